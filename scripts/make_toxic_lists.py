"""Writes `toxic.txt.gz` of the package: the word lists of LDNOOBW (CC-BY-4.0), each entry with a weight.

    python scripts/make_toxic_lists.py badwords src/forebay/prepare/clean/toxic.txt.gz

`badwords` is a clone of github.com/LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words, unchanged: one file a
language. The weights are ours: 1 for an entry that honest text has as well (`sexual`, names, Roman numerals), 5 for any
other of English, 3 for those of other languages, which were not examined one by one, 0 for entries that are honest in
most places. `+` before an entry marks one that is ours.
"""

import gzip
import sys
from pathlib import Path

NONE = (
    "babeland;bareback;barenaked;big black;birdlock;bulldyke;cornhole;dendrophilia;ecchi;eunuch;figging;frotting;"
    "girl on;guro;hooker;lolita;mong;one guy one jar;playboy;poof;poon;santorum;scat;skeet;snatch;snowballing;"
    "sultry women;tainted love;taste my;tied up;tight white;tongue in a;twinkie;violet wand;wrapping men;xx;"
    "alaskan pipeline;shrimping;honkey;butt;suicide girls;mr hands;octopussy;quim;throating;coon;coons;sm;bastard"
)
SOFT = (
    "anal;anus;ass;cum;ball gag;bastardo;bastinado;bbw;bdsm;bestiality;big breasts;bimbos;blonde action;bollocks;"
    "bondage;boner;boob;boobs;busty;buttcheeks;camel toe;cialis;clit;clitoris;cock;cocks;creampie;darkie;"
    "date rape;daterape;dick;domination;dominatrix;ejaculation;erotic;erotism;escort;fag;fecal;genitals;god damn;"
    "grope;hard core;hardcore;horny;how to kill;how to murder;humping;incest;intercourse;kinky;lovemaking;"
    "masturbate;masturbating;masturbation;menage a trois;missionary position;nambla;negro;neonazi;nipple;nipples;"
    "nsfw;nude;nudity;nutten;nymphomania;orgasm;orgy;paedophile;panties;panty;pedophile;pegging;penis;pissing;"
    "pornography;pubes;rape;raping;rapist;rectum;sadism;schlong;semen;sex;sexo;sexual;sexuality;sexually;sexy;"
    "smut;sodomize;sodomy;spastic;spunk;strap on;strapon;strappado;strip club;suck;sucks;swastika;swinger;"
    "threesome;tit;tits;topless;tosser;twink;undressing;urethra play;vagina;viagra;vibrator;voyeur;vulva;"
    "wet dream;white power;xxx;yaoi;hentai;homoerotic;bitch;whore;slut;porn;porno;pussy;hot chick;barely legal;"
    "jail bait;make me come;beaver cleaver;rosy palm;kinbaku;shota;futanari;s&m;g-spot;fingering;scissoring;"
    "livesex;deep throat;piece of shit;bullshit;gay sex"
)
OURS = (
    "f*ck;f**k;f*cking;f**king;fcuk;fuckers;fucker;fucked;fucks;mother fucker;motherfucking;motherfuckers;"
    "sh*t;sh1t;shithead;shitheads;dipshit;bullshitter;b*tch;b1tch;a**hole;a$$hole;assholes;asshat;dumbass;"
    "dumbasses;jackass;dickhead;dickheads;cocksucker;cocksuckers;cunts;sluts;sluttier;slutty;whores;faggots;"
    "retards;kill yourself;kys;go die;bitchy;blowjobs;cumming;gangbanged;tranny porn;xxx videos;free porn;"
    "porn videos;porn video;hot girls;sex videos;sex video;sex cams;horny girls;horny milf;milfs;nudes;"
    "naked girls;twats;wankers;wanker;douchebag;douchebags"
)


def main(lists: str, out: str) -> None:
    none, soft = set(NONE.split(";")), set(SOFT.split(";"))
    lines = [
        "# Words of the List of Dirty, Naughty, Obscene, and Otherwise Bad Words, copyright its contributors, by",
        "# CC-BY-4.0 (creativecommons.org/licenses/by/4.0). Changed: weights, and the entries with + were added.",
    ]
    for path in sorted(Path(lists).iterdir()):
        if path.name == "LICENSE":
            continue
        lines.append(f"[{path.name}]")
        for word in dict.fromkeys(line.strip() for line in path.read_text("utf-8").splitlines()):
            weight = 3 if path.name != "en" else 0 if word in none else 1 if word in soft else 5
            lines += [f"{weight} {word}"] * bool(word)
        lines += [f"5 +{word}" for word in OURS.split(";") if path.name == "en"]
    Path(out).write_bytes(gzip.compress("\n".join(lines).encode(), 9, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
