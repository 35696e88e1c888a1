"""Numbers that countries give: the published examples, and the same with another check digit."""

import pytest

from forebay.prepare.clean.pii import Pii
from support.batches import drop_codes, stage_texts, to_batch

NUMBERS = {  # as authorities publish them, or computed by their rules; with `~`, a digit that does not check
    "us_ssn": ("457-55-5462", "SSN 457 55 5462", "Social Security number: 123456789", "~666-55-5462", "~SSN 000554567"),
    "us_itin": ("ITIN 912-71-1234", "~ITIN 812-71-1234",),
    "uk_nino": ("AB 12 34 56 C", "AB123456C", "~BG123456C"),
    "uk_nhs": ("NHS number: 943 476 5919", "NHS no 9434765919", "~NHS number: 943 476 5918"),
    "de_tax_id": ("Steuer-ID 86 095 742 719", "IdNr. 86095742719", "~IdNr. 86095742718"),
    "fr_nir": ("2 55 08 14 168 025 38", "255081416802538", "1 85 05 2A 006 084 35", "~255081416802539"),
    "es_dni": ("12345678Z", "X1234567L", "X-1234567-L", "~12345678A"),
    "it_fiscal_code": ("RSSMRA85T10A562S", "rssmra85t10a562s", "~RSSMRA85T10A562T"),
    "pl_pesel": ("PESEL 44051401359", "~PESEL 44051401358"),
    "nl_bsn": ("BSN 111222333", "burgerservicenummer 1112.22.333", "~BSN 111222334"),
    "br_cpf": ("529.982.247-25", "CPF 52998224725", "~529.982.247-26"),
    "br_cnpj": ("11.222.333/0001-81", "~11.222.333/0001-82"),
    "in_aadhaar": ("Aadhaar 2341 2341 2346", "~Aadhaar 2341 2341 2347"),
    "in_pan": ("ABCPE1234F", "~ABCQE1234F"),
    "ca_sin": ("SIN 046 454 286", "social insurance number 046-454-286", "~SIN 046 454 287"),
    "cn_resident_id": ("11010519491231002X", "11010519491231002x", "~110105194912310021"),
    "se_personal_id": ("811218-9876", "19811218-9876", "~811218-9875"),
    "fi_personal_id": ("131052-308T", "~131052-308U"),
    "no_birth_number": ("01010750160", "~01010750161"),
    "dk_cpr": ("CPR 070761-4285", "~CPR 320761-4285"),
    "be_national_id": ("85.07.30-033.28", "~85.07.30-033.29"),
    "ch_ahv": ("756.9217.0769.85", "7569217076985", "~756.9217.0769.86"),
    "pt_nif": ("NIF 123456789", "~NIF 123456788"),
    "ro_cnp": ("CNP 1800101221144", "~CNP 1800101221145"),
    "tr_identity": ("T.C. kimlik no 10000000146", "~T.C. kimlik no 10000000147"),
    "kr_rrn": ("800101-1234560", "~801301-1234560"),
    "jp_my_number": ("マイナンバー 1234 5678 9018", "~マイナンバー 1234 5678 9019"),
    "mx_curp": ("HEGG560427MVZRRL04", "~HEGG560427MVZRRL05"),
    "au_tfn": ("TFN 123 456 782", "~TFN 123 456 783"),
    "za_id": ("ID number 8001015009087", "~ID number 8001015009088"),
    "passport": ("Passport No. AB1234567", "Reisepass 123456789", "~pass 123456789"),
    "driving_licence": ("driver's license number is F162823540116", "~license F162823540116"),
    "wallet": ("1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa", "bc1qar0srrr7xfkvy5l643lydnw9re59gtzzwf5mdq",
               "0xde0B295669a9FD93d5F28D9Ec85E40f4cb697BAe", "~1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNb",
               "~bc1qar0srrr7xfkvy5l643lydnw9re59gtzzwf5mdp"),
    "mac": ("00:1A:2B:3C:4D:5E", "00-1a-2b-3c-4d-5e", "~00:1A:2B:3C:4D"),
    "coordinates": ("48.137154, 11.576124", "~98.137154, 11.576124"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers(kind):
    stage = Pii(kinds=(kind,))
    good = [text for text in NUMBERS[kind] if text[0] != "~"]
    invalid = [f"See {text[1:]}, it says." for text in NUMBERS[kind] if text[0] == "~"]
    masked = stage_texts(stage, [f"See {text}, it says." for text in good])
    assert all(f"<{kind}>, it says." in text for text in masked), masked
    assert stage_texts(stage, invalid) == invalid


def test_kinds_of_a_country_and_those_beside_others():
    text = "SSN 457-55-5462, AB123456C, a@b.com, BSN 111222333, 00:1A:2B:3C:4D:5E"
    assert stage_texts(Pii(kinds=("us", "uk")), [text]) == [
        "SSN <us_ssn>, <uk_nino>, a@b.com, BSN 111222333, 00:1A:2B:3C:4D:5E"
    ]
    several = "SSNs: 457-55-5462, 457555463 and born 457555464"
    assert stage_texts(Pii(), [several]) == ["SSNs: <us_ssn>, <us_ssn> and born 457555464"]
    assert stage_texts(Pii(), [text]) == ["SSN <us_ssn>, <uk_nino>, <email>, BSN <nl_bsn>, 00:1A:2B:3C:4D:5E"]
    key = 'token = "457-55-5462a8F3kd92LLq0Zx7Yp1"'
    assert stage_texts(Pii(), [key, "NHS 943 476 5919 call 943 476 5919"]) == [
        'token = "<key>"', "NHS <uk_nhs> call <phone>",
    ]  # fmt: skip


def test_what_is_part_of_something_longer_stays():
    texts = ["x-457-55-5462", "457-55-5462-1", "$457-55-5462", "/457-55-5462", "457-55-5462@host", "é457-55-5462"]
    assert stage_texts(Pii(kinds=("us_ssn",)), texts) == [*texts[:5], "é<us_ssn>"]


def test_documents_with_much_personal_data_are_dropped():
    texts = ["a@b.com and c@d.com", "a@b.com " + "word " * 999, "word " * 50, ""]
    assert drop_codes(Pii(), texts) == [-1] * 4
    result = Pii(max_count=1).apply(to_batch(texts))
    assert result.drop.tolist() == [0, -1, -1, -1] and result.counts == {"email": 1}
