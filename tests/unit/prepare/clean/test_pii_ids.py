"""Numbers that countries give: the published examples, and the same with another check digit."""

import pytest

from forebay.prepare.clean.pii import Pii
from support.batches import drop_codes, stage_texts, to_batch
from support.paths import read_cases

NUMBERS = read_cases("pii_ids")


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
