"""Writes `toxic.txt.gz` of the package: the word lists of LDNOOBW (CC-BY-4.0), each entry with a weight.

    python scripts/make_toxic_lists.py badwords src/forebay/prepare/clean/toxic.txt.gz

`badwords` is a clone of github.com/LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words, unchanged: one file a
language. The weights are ours: 1 for an entry that honest text has as well (`sexual`, names, Roman numerals), 5 for any
other of English, and for those that `HARD` names in nine languages; 3 for those of other languages, which were not
examined one by one, 0 for entries that are honest in most places. `+` before an entry marks one that is ours.
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
    "rimming;bunghole;dog style;jackass;faggots;dildo;paki;livesex;deep throat;piece of shit;bullshit;gay sex"
)
OURS = (
    "f*ck;f**k;f*cking;f**king;fcuk;fuckers;fucker;fucked;fucks;mother fucker;motherfucking;motherfuckers;"
    "sh*t;sh1t;shithead;shitheads;dipshit;bullshitter;b*tch;b1tch;a**hole;a$$hole;assholes;asshat;dumbass;"
    "dumbasses;dickhead;dickheads;cocksucker;cocksuckers;cunts;sluts;sluttier;slutty;whores;faggots;"
    "retards;kill yourself;kys;go die;bitchy;blowjobs;cumming;gangbanged;tranny porn;xxx videos;free porn;"
    "porn videos;porn video;hot girls;sex videos;sex video;sex cams;horny girls;horny milf;milfs;nudes;"
    "naked girls;twats;wankers;wanker;douchebag;douchebags"
)

HARD = {
    "de": (
        "arschficker;arschlecker;arschloch;arschlöcher;arschlöchern;arschgesicht;fick dich;fickt euch;fickt dich;"
        "ficken;"
        "gefickt;ficker;fotze;fotzen;hurensohn;hurensöhne;hurentochter;hure;huren;nutte;nutten;schlampe;schlampen;"
        "wichser;wichsern;schwanzlutscher;schwuchtel;schwuchteln;missgeburt;missgeburten;drecksau;drecksäue;dreckskerl;"
        "kanake;kanaken;kackbratze;hackfresse;pisser;scheißkerl;scheisskerl;scheiß;scheiss;scheiße;scheisse;beschissen;"
        "beschissene;verfickt;verfickte;verfickter;verfickten;verpiss dich;verpisst euch;leck mich am arsch;"
        "halt die fresse;"
        "halts maul;halt dein maul;spast;spasti;vollidiot;vollidioten;titten;muschi;bumsen;vögeln;pimmel;arschfick;"
        "geile schlampe;neger;nigger;judensau;untermensch;untermenschen;krepier;verrecke;bring dich um"
    ),
    "fr": (
        "branler;branleur;branleurs;branleuse;chier;chiotte;connard;connards;connasse;connasses;couilles;encule;enculé;"
        "enculés;enculée;enculer;enculeur;enfoiré;enfoirés;enfoirée;fils de pute;fille de pute;fdp;foutre;fous le camp;"
        "va te faire foutre;va te faire enculer;allez vous faire foutre;gouine;la putain de ta mère;nique ta mère;ntm;"
        "nique ta race;niquer;pédé;pédés;pouffiasse;putain;putains;pute;putes;salope;salopes;salaud;salauds;salopard;"
        "sac à merde;tapette;trou du cul;trouduc;merde;merdes;emmerder;emmerdeur;ta gueule;ferme ta gueule;bougnoule;"
        "bougnoules;youpin;négro;sale arabe;sale juif;sale noir;suce ma bite;bite;bites;chatte;sous-merde;crève;"
        "bâtard;batard;dégueulasse;baiser ta mère;suicide-toi;tue-toi"
    ),
    "es": (
        "cabrón;cabrones;cabrona;chupapollas;concha de tu madre;coño;culero;follar;follando;follador;gilipollas;"
        "hija de puta;hijas de puta;hijo de puta;hijos de puta;hijaputa;hijoputa;hijueputa;jilipollas;joder;jodido;"
        "jodida;jódete;jodete;lameculos;malparido;malparida;mamón;marica;maricas;maricón;maricones;mierda;mierdas;"
        "me cago en;chinga tu madre;chingar;chingada;pinche;pendejo;pendeja;pendejos;perra;polla;puta;putas;puto;putos;"
        "que te jodan;vete a la mierda;vete a tomar por culo;verga;zorra;zorras;soplapollas;subnormal;subnormales;"
        "mongólico;sudaca;sudacas;ojalá te mueras;mátate;muérete"
    ),
    "it": (
        "bastardo;bastardi;cazzo;cazzi;coglione;coglioni;cogliona;figlio di puttana;figli di puttana;fottere;fottiti;"
        "fottuto;fottuta;frocio;froci;inculare;merda;merde;merdoso;mignotta;minchia;pompino;pompini;porca puttana;"
        "porca troia;porco dio;puttana;puttane;rottinculo;ricchione;ricchioni;scopare;sborra;stronzo;stronzi;stronza;"
        "stronze;stronzata;stronzate;testa di cazzo;teste di cazzo;troia;troie;vaffanculo;vai a cagare;zoccola;zoccole;"
        "rompicoglioni;figa;sporco negro;terrone;ammazzati;crepa"
    ),
    "pt": (
        "arrombado;arrombada;boceta;buceta;boquete;cabrão;caralho;caralhos;cona;corno;cuzão;filha da puta;"
        "filho da puta;"
        "filhos da puta;fdp;foda;foda-se;foder;fodido;fodida;fuder;merda;merdas;paneleiro;paneleiros;piranha;piroca;"
        "porra;punheta;puta;putas;puta que pariu;puto;vadia;vadias;vai se foder;vai tomar no cu;vai te foder;viado;"
        "viados;veado;xoxota;otário;otários;desgraçado;se mata;macaco de merda"
    ),
    "nl": (
        "eikel;flikker;flikkers;godverdomme;godver;hoer;hoeren;hoerenzoon;kanker;kankerlijer;kankerhoer;kankerwijf;"
        "klootzak;klootzakken;klote;kut;kutwijf;kutmarokkaan;kutmarokkanen;lul;lullen;mongool;mongolen;neuken;neuk;"
        "nikker;pik;pijpen;rot op;slet;sletten;stront;tering;teringlijer;tyfus;tyfuslijer;trut;val dood;verneukt;"
        "homo's;krijg de kanker;krijg de tering;sodemieter op;hou je bek;bek dicht;sterf"
    ),
    "pl": (
        "chuj;chuja;chuje;chujowy;cipa;cipę;cipy;ciota;cwel;debil;debile;dupa;dupek;dupy;dziwka;dziwki;dziwko;"
        "jebać;jebany;"
        "jebana;jebane;jebani;jebie;jebaniec;kurwa;kurwy;kurwo;kurwą;kurewski;kutas;kutasa;kutasy;matkojebca;"
        "odpierdol się;pedał;pedały;pierdol się;pierdolić;pierdolony;pierdolona;pierdolone;pierdoleni;pizda;pizdy;"
        "pojebany;pojebana;ruchać;skurwysyn;skurwysyny;skurwiel;skurwysynu;spierdalaj;spierdalać;suka;suko;suki;"
        "szmata;szmato;"
        "śmieciu;wypierdalaj;wypierdalać;wkurwia;zajebać;zajebię;zdychaj;zjeb;zjeby;gówno;gówna;gównem"
    ),
    "ru": (
        "блядь;бляди;блядью;блять;бля;блядина;блядки;блядский;блядская;блядство;выблядок;гандон;гандоны;гондон;гондоны;"
        "говно;говна;говном;говнюк;дерьмо;дерьма;дебил;дебилы;долбоёб;долбоеб;долбоёбы;долбоебы;дрочить;дрочи;дрочит;"
        "еблан;ебланы;ебать;ебаный;ебаная;ебаные;ёбаный;ёбаная;ёбаные;ебал;ебало;ебаться;ебись;ебут;ебёт;ебет;ебучий;"
        "ебучие;заебал;заебали;заебись;наебать;наебал;отъебись;съебись;уебок;уёбок;уебки;уёбки;уебище;уёбище;ублюдок;"
        "ублюдки;жопа;жопу;залупа;мразь;мрази;мудак;мудаки;мудаков;мудила;манда;нахуй;на хуй;нахер;нихуя;ни хуя;"
        "охуел;охуели;охуеть;похуй;хуй;хуя;хую;хуем;хуи;хуйня;хуйню;хуйней;хуесос;хуесосы;хуёвый;хуево;пидор;пидоры;"
        "пидорас;пидорасы;пидарас;пидарасы;пидар;педик;педики;пизда;пизды;пизду;пиздец;пиздить;пиздит;пиздеж;распиздяй;"
        "спиздил;опизденеть;сука;суки;сучка;сучки;сучара;сволочь;тварь;твари;трахать;трахал;трахну;хач;хачи;"
        "чурка;чурки;"
        "черножопый;жид;жиды;хохол;шалава;шалавы;шлюха;шлюхи;шлюху;сдохни;сдохните;убей себя;иди нахуй;пошёл нахуй;"
        "пошел нахуй;отсоси;соси"
    ),
    "zh": (
        "傻逼;傻屄;傻比;煞笔;操你;操你妈;操你娘;操你全家;草泥马;日你妈;肏;他妈的;他媽的;妈的;妈逼;妈了个逼;你妈逼;你妈的;"
        "去你妈;去死;王八蛋;狗日;狗日的;狗屁;狗杂种;杂种;婊子;婊子养的;臭婊子;骚货;骚逼;贱人;贱货;贱逼;荡妇;鸡巴;雞巴;"
        "屌;屄;干你娘;幹你娘;幹你;滚蛋;混蛋;脑残;腦殘;白痴;智障;废物;人渣;畜生;死全家;不得好死;尼玛;卧槽;鸡奸;轮奸;"
        "口交;肛交;乳交;色情;淫荡;淫妇;強姦;老母;冚家鏟;仆街;支那猪;黑鬼"
    ),
}
SOFT_OF = {
    "de": (
        "hure;huren;neger;muschi;titten;vögeln;verrecke;krepier;untermensch;untermenschen;judensau;kanake;"
        "kanaken;scheiß"
    ),
    "fr": "chatte;bite;bites;bâtard;batard;crève;tapette;gouine;négro;merde;youpin;chiotte;foutre",
    "es": "pinche;perra;zorra;zorras;polla;verga;puto;joder;marica;maricas;subnormal;mongólico;mamón",
    "it": "figa;terrone;crepa;scopare;merda;bastardo;bastardi;troia;fottere",
    "pt": "veado;corno;piranha;piroca;porra;merda;cona;vadia;vadias;desgraçado;otário;otários",
    "nl": "eikel;pik;pijpen;lul;lullen;mongool;mongolen;homo's;sterf;kanker;tering;tyfus;slet;sletten;trut;stront;neuk",
    "pl": "dupa;dupy;suka;suki;debil;debile;szmata;śmieciu;cipa;pizda",
    "ru": "жид;жиды;хохол;тварь;твари;сволочь;дебил;дебилы;жопа;жопу;соси;сучка;дерьмо;дерьма;шлюха;педик;хач;чурка",
    "zh": "去死;废物;人渣;畜生;色情;老母;滚蛋;白痴;智障;屌;强姦;口交;肛交;黑鬼;仆街;狗屁;鸡奸;轮奸;不得好死;卧槽",
}
NONE_OF = {
    "de": (
        "bimbo;bonze;ische;kimme;lümmel;möpse;mufti;popel;rosette;schabracke;schiesser;nippel;nackt;orgasmus;"
        "penis;fratze"
    ),
    "fr": (
        "baiser;bander;bitte;bordel;bourré;bourrée;con;conne;caca;folle;gerbe;gerber;gueule;jouir;meuf;nègre;"
        "negro;pédale;"
        "péter;pipi;ramoner;suce;tanche;trique;tringler;ménage à trois;clitoris;cul;grande folle;zizi;teuch"
    ),
    "es": (
        "asesinato;asno;bastardo;caca;chupada;concha;drogas;esperma;heroína;idiota;imbécil;infierno;maciza;maldito;"
        "martillo;nazi;orina;pedo;pervertido;pezón;pis;prostituta;racista;ramera;sádico;semen;sexo;sexo oral;"
        "trio;vulva;"
        "haciendo el amor;travesti;culo;bollera;chupetón"
    ),
    "it": (
        "allupato;balle;bagnarsi;battere;biga;cadavere;cagna;casci;cesso;chiappa;cornuto;cozza;fava;femminuccia;"
        "figone;finocchio;"
        "goldone;guardone;imbecille;mannaggia;mona;monta;montare;mussa;nave scuola;padulo;palle;patacca;pesce;"
        "pippa;pirla;"
        "pipì;pisello;pistolotto;pompa;porca;porco;potta;quaglia;regina;ruffiano;sbattere;sega;spagnola;"
        "tarzanello;tette;topa;"
        "tirare;trombare;vacca;vangare;zio cantante;anale;bordello;fica;arrapato;pecorina;succhiami"
    ),
    "pt": (
        "aborto;amador;ânus;aranha;ariano;bastardo;bicha;bissexual;burro;bumbum;camisinha;cerveja;chupar;"
        "clitoris;cocaína;coito;"
        "comer;consolo;cu;dum raio;fecal;frango assado;gozar;grelho;heroína;heterosexual;homem gay;homoerótico;"
        "homosexual;"
        "inferno;lésbica;lolita;mama;passar um cheque;pau;pênis;pinto;saco;torneira;vibrador;cacete;peidar;queca"
    ),
    "nl": (
        "aardappels afgieten;anita;asbak;aftrekken;afwerkplaats;balen;bekken;beurt;boemelen;brugpieper;buffelen;"
        "de ballen;del;"
        "de hond uitlaten;draaikont;een beurt geven;engerd;flikken;gat;gedoogzone;gras maaien;griet;hol;johny;"
        "kanen;knor;kont;"
        "lummel;matje;mof;muts;naakt;naaien;nicht;paal;palen;penoze;poep;poot;pot;reet;remsporen;schatje;schoft;"
        "spuiten;standje;"
        "stootje;sufferd;toeter;vergallen;voor jan lul;watje;welzijnsmafia;wijf;wippen;zaadje;zuigen;"
        "boerenpummel;huisdealer;"
        "de pijp uitgaan;driehoog achter wonen;potverdorie;raaskallen;slempen;kloten;matennaaier;een wip maken;tongzoen"
    ),
    "pl": "burdel;burdelmama;cyc;dmuchać;duperele;fiut;jajco;jajko;pieprzyć;rzygać;syf;sraczka;pierdoła",
    "fa": "تجاوز;کس;خر;سگ;گاو",
    "ru": (
        "byk;gol;uboy;petuh;бугор;какая разница;мент;хапать;голый;обнаженный;секс;половое сношение;фига;хрен;на фиг;"
        "хер с ней;хер с ним;другой дразнится;ты мне ваньку не валяй;муда;курите мою трубку"
    ),
    "zh": (
        "13.;13点;乳;乳头;乳房;交配;九游;卵;卵子;包皮;处女;外阴;奶;奶子;妓;妓女;妓院;嫖客;性;性交;性器;性爱;性无能;成人;撒尿;"
        "月经;激情;爛;玉杵;私服;祖宗;精子;老二;老味;迷药;逼;野鸡;阳具;阳萎;阴唇;阴茎;阴道;阴部;陰莖;靠背;花柳;柒;撚;鳩;尻;"
        "笨蛋;屁股;你老闆;粉腸;强奸;軍妓;军妓;卖淫;嫖娼;招妓;刚度;姘头;后庭;吹箫;射精;插你;幹;十三点;笨實;龟头;奸;淫;扒光;"
        "瓜娃子;巨乳;情色;鸡鸡;打飞机;打炮;奶奶的熊;个老子的;密洞;口肯;抽插;叫床;贱B;肉棒;肉壁;肉缝;赤裸;你全家;姦;賤"
    ),
}


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
        hard = list(dict.fromkeys(HARD.get(path.name, "").split(";"))) if path.name in HARD else []
        mild = set(SOFT_OF.get(path.name, "").split(";"))
        left_out, listed = set(NONE_OF.get(path.name, "").split(";")), list[str]()
        for word in dict.fromkeys(line.strip() for line in path.read_text("utf-8").splitlines()):
            listed.append(word)
            weight = 3 if path.name != "en" else 0 if word in none else 1 if word in soft else 5
            weight = (
                0 if word.lower() in left_out else 1 if word.lower() in mild else 5 if word.lower() in hard else weight
            )
            lines += [f"{weight} {word}"] * bool(word)
        ours = OURS.split(";") if path.name == "en" else [word for word in hard if word not in map(str.lower, listed)]
        lines += [f"{1 if word in mild else 5} +{word}" for word in ours]
    Path(out).write_bytes(gzip.compress("\n".join(lines).encode(), 9, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
