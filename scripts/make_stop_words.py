"""Writes `stop_words.txt` of the package: the most frequent words of each language of the Declaration of Human Rights.

    python scripts/make_stop_words.py udhr2.zip src/forebay/prepare/filters/stop_words.txt

As FineWeb-2 (Penedo et al. 2025) does it: the words that make at least 0.8 % of a text, and no fewer than 8 (here 16).
Its texts are Wikipedia's. The declaration is in the public domain, but has 1,700 words, of which some (`right`,
`person`) are frequent there alone; so words longer than the mean, which few function words are, are left out. Of the
words of 30 languages 76 % are on NLTK's lists, which are not used. Words are cut as the filters cut them. `udhr2.zip`
is of NLTK's data.
"""

import re
import sys
import zipfile
from collections import Counter
from pathlib import Path

from forebay.prepare.filters.words import split_words

MIN_SHARE, MIN_WORDS, MAX_WORDS = 0.008, 16, 32
ISO_639_1 = (
    "abk:ab afr:af aka:ak als:sq amh:am arb:ar ayr:ay azj:az bam:bm bel:be ben:bn bis:bi bod:bo bos:bs bre:br bul:bg "
    "cat:ca ces:cs cha:ch cmn:zh cos:co csw:cr cym:cy dan:da deu:de div:dv dzo:dz ell:el eng:en epo:eo est:et eus:eu "
    "ewe:ee fao:fo fij:fj fin:fi fra:fr gla:gd gle:ga glg:gl gug:gn guj:gu hat:ht hau:ha heb:he hin:hi hrv:hr hun:hu "
    "hye:hy ibo:ig ido:io ike:iu ina:ia ind:id isl:is ita:it jav:jv jpn:ja kal:kl kan:kn kat:ka kaz:kk khk:mn khm:km "
    "kin:rw kir:ky knc:kr kng:kg kor:ko lao:lo lat:la lav:lv lin:ln lit:lt ltz:lb lug:lg mah:mh mal:ml mar:mr mkd:mk "
    "mlt:mt mri:mi mya:my nav:nv nbl:nr ndo:ng nep:ne nld:nl nno:nn nob:no nya:ny ojb:oj oss:os pan:pa pes:fa plt:mg "
    "pol:pl por:pt pbu:ps quz:qu roh:rm ron:ro run:rn rus:ru sag:sg san:sa slk:sk slv:sl sme:se smo:sm sna:sn som:so "
    "sot:st spa:es src:sc srp:sr ssw:ss sun:su swe:sv swh:sw tah:ty tam:ta tat:tt tgk:tg tgl:tl tha:th tir:ti ton:to "
    "tsn:tn tso:ts tuk:tk tur:tr uig:ug ukr:uk urd:ur uzn:uz ven:ve vie:vi wln:wa wol:wo xho:xh ydd:yi yor:yo zul:zu"
)
MACRO = {"azj": "aze", "als": "sqi", "arb": "ara", "khk": "mon", "lav": "lvs", "nob": "nor", "plt": "mlg", "cmn": "zho",
         "pes": "fas", "swh": "swa", "uzn": "uzb", "ydd": "yid", "est": "ekk", "ckb": "kur"}  # fmt: skip
"""Codes of ISO 639-3 that name the same text."""


def main(archive: str, out: str) -> None:
    short = dict(pair.split(":") for pair in ISO_639_1.split())
    texts: dict[str, list[str]] = {}
    with zipfile.ZipFile(archive) as files:
        for name in sorted(files.namelist()):
            code = Path(name).stem.split("_")[0]
            if name.endswith(".txt") and re.fullmatch("[a-z]{3}", code):
                texts.setdefault(code, []).append(files.read(name).decode("utf-8"))
    lines = []
    for code, sources in texts.items():
        words = dict.fromkeys(word for text in sources for word in _frequent(text))
        if not words:
            continue
        names = [short.get(code), code, MACRO.get(code)]
        lines.append(f"{' '.join(dict.fromkeys(name for name in names if name))}: {' '.join(words)}")
    Path(out).write_text(HEAD + "\n".join(lines) + "\n", "utf-8")


HEAD = "# Codes of a language: its frequent words, by scripts/make_stop_words.py of the Declaration of Human Rights.\n"


def _frequent(text: str) -> list[str]:
    words = [word for word in split_words(text) if any(map(str.isalpha, word))]
    counts = Counter(word for word in words if word == word.lower())
    mean = sum(map(len, words)) / max(len(words), 1)
    ranked = [(word, count) for word, count in counts.most_common(4 * MAX_WORDS) if len(word) <= mean]
    frequent = [word for word, count in ranked[:MAX_WORDS] if count >= MIN_SHARE * len(words)]
    return frequent if len(frequent) >= MIN_WORDS else [word for word, _ in ranked[:MIN_WORDS]]


if __name__ == "__main__":
    main(*sys.argv[1:])
