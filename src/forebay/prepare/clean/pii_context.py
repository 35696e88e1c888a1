"""Decides by the words around it whether what is written like an address or a number is personal.

A version, a section or an enzyme has four numbers like an IPv4 address; an order or an article has the digits of a
telephone number or a card. Numbers that are small enough for a version are an address only if nothing speaks for one.
"""

import functools
from typing import Any

import re2

BEFORE_BYTES, AFTER_BYTES = 64, 24
OTHER_NUMBER = (
    r"(?i)\b(?:is[bsm]n|ean|gtin|upc|barcode|imei|imsi|iccid|sku|part|order|invoice|serial|model|article|artikel|"
    r"item|"
    r"product|ref|reference|case|ticket|tracking|doi|pmid|arxiv|cas|lot|batch|catalog(?:ue)?|patent|commit|build|"
    r"(?:\w{0,20}_)?id|uuid|tweet|status|bestell|rechnungs?|auftrags?|seriennummer|commande|pedido|factura|заказ)"
    r"(?:.{0,2}(?:no|number|nr|nummer|num|id|code|№|n°))?[\W_]{0,5}$"
)
"""Words before a number that is no telephone, card or social security number."""
_COUNTED = (
    r"(?i)^[ -](?:people|persons|users|viewers|visitors|views|units|copies|times|bytes|bits|rows|items|records|files|"
    r"lines|words|tokens|votes|dollars|euros|pounds|yen|km|kg|tons|tonnes|years|miles|meters|metres|inhabitants|"
    r"members|subscribers|followers|downloads|menschen|einwohner|personen|nutzer|stück|euro|mal|personnes|"
    r"habitants)\b"
)
CALL = (
    r"(?i)\b(?:(?:tele|cell|mobile)?(?:phone|fone|fon|foon|ph)(?: ?(?:no|number|nr|num))?s?\b|tel\b|t[eé]l[eé]f|"
    r"t[eé]l\b|"
    r"(?:call(?:back)?|dial|ring|fax|cell|mobile|whatsapp|sms|viber|handy|mobil|m[oó]vil|hotline|extension|"
    r"mobilnr|handynr)"
    r"(?:ed|ing|e|er)?\b|telefax|reach\b|contact\b|answer(?:ing)? at|messages? (?:to|at)|text (?:me|us) at)"
    r"|电话|電話|手机|тел|φων|هاتف"
)
"""Words before a telephone number whose digits alone could be another number."""
_FILE = (
    r"(?i)^(?:\.(?:tar|tgz|zip|jar|war|exe|whl|egg|deb|rpm|dll|so|msi|dmg|apk|gem|t?gz|t?xz|t?bz2|7z|pdf|nupkg|"
    r"crate|iso|"
    r"img|bin)\b|[-+~_.](?:alpha|beta|rc|snapshot|release|final|dev|ga|post|el\d|x86|amd64|win|linux)|[^\s\w]?beta\b)"
)
_VERSION = (
    r"(?i)(?:\b(?:v|ve?rs?|versn|rel|releases?|rev|revisions?|builds?|firmware|fw|bios|sections?|sect?|sez|secc|"
    r"chapters?|"
    r"chap|cap|clauses?|kapitel|abschnitte?|absatz|chapitres?|capítulos?|capitolo|sección|secciones|sezione|seção|"
    r"раздел|глава|пункт|п|rozdział|hoofdstuk|paragraaf|oids?|ec|tc|enzymes?|§|chrome|chromium|firefox|safari|"
    r"opera|edge|"
    r"java|jdk|jre|openssl|oracle|flash player|acrobat|reader|skype|mysql|postgresql|windows|macos|ios|android)|"
    r"vers(?:i[oóòõ]n|ión|ão|iones|ões|ie|ione|ija|ionen)\pL*|верси\pL*|wersj\pL*|§|版本|版|バージョン|第|버전)"
    r"(?: (?:no|nr|number|is|was|of|to|from))?[^\pL\pN]{0,5}(?:v\.?)?$"
)
"""Words right before the numbers of a version, a section or an enzyme, however great they are."""
_OF_VERSIONS = (
    r"(?i)\b(?:versions?|releases?|upgrad\pL*|downgrad\pL*|updat\pL*|patch\pL*|drivers?|kernel|sdk|api|library|"
    r"package|"
    r"plugin|app|art(?:icles?|icolo|ikel|ículo)?|tab(?:le|elle)?|fig(?:ure)?s?|abb|bild|paragraphs?|para|appendix|"
    r"annex|"
    r"anhang|rules?|steps?|items?|requirements?|req|theorem|lemma|definition|def|examples?|exercises?|equations?|eq|"
    r"levels?|pp?|pages?|ch|no|nr|see|siehe|vgl|cf|voir|siehe auch|punkt|point|ziffer|nummer|install\pL*|"
    r"requires?|gem|pip|bump\pL*|described|defined|specified|according)\b"
)
_ADDRESS = (
    r"(?i)\b(?:ips?|ipv?4|inet|addr\pL*|adress\pL*|indirizz\pL*|direcci\pL*|endere\pL*|hosts?|hostname|host_?ip|"
    r"servers?|"
    r"dns|nameservers?|resolvers?|gateways?|prox(?:y|ies)|routers?|clients?|ping\pL*|ssh|scp|rsync|telnet|ftp|"
    r"curl|wget|"
    r"traceroute|nmap|whois|vpn|subnet|netmask|network|ports?|tcp|udp|https?|logged|log(?:in|on)|users?|usuarios?|"
    r"benutzer|visitors?|anonymous|anon|contribs?|contributions|talk|remote|peers?|received|forwarded\pL*|for|by|"
    r"listen\pL*|"
    r"bind|connect\pL*|allow|deny|ban\pL*|block\pL*|spam\pL*|abuse|vandal\pL*|attack\pL*|hack\pL*|route|lan|wan|"
    r"src|dst|source|"
    r"destination|upstream|requests?|rechner|machines?|internet|a|aaaa|ptr|mx|адрес\pL*|сервер\pL*|хост)\b"
    r"|\b(?:client|host|source|src|remote|dest|my)_?ip\b|_ip\b|_addr|://|(?-i:\b(?:GET|POST|HEAD|PUT)\b)|地址|アドレス|"
    r"주소|サーバ"
)
_NAMED = r"(?:\pL[\pL\pN_.+]*(?:[-:/@]| ?(?:[=!~<>]=|===?|~>|\^) ?)[\"']?|[~^]>? ?|>= ?|<= ?)$"
_HEADING = r"(?:^|\n)[ \t#*>]*$"
_NAME = r"(\pL[\pL\pN_+#.-]+)[\"']? ?[,:=(]{0,2} ?[(\"']?$"
_NO_NAME = (
    r"(?i)^(?:"
    r"from|at|to|is|was|be|are|by|on|of|and|or|as|with|via|the|in|for|use|using|try|set|that|this|it|its|"
    r"into|over|through|von|der|die|das|ist|war|an|auf|mit|und|oder|bei|zu|aus|nach|über|le|la|les|est|à|"
    r"et|ou|de|des|du|par|sur|vers|el|los|es|en|y|o|por|con|il|di|da|e|su|per|o|os|são|em|para|com|и|в|с|"
    r"на|от|к|из|или|это|het|een|op|naar|met"
    r")$"
)
"""Words before an address that are not the name of a program."""
_JOINED = r"(?i)^(?:[\s,;/–—-]|and|or|to|through|und|bis|oder|et|ou|à|y|o|e|i|и|до|～|、|至|와){1,8}$"
_FILES = frozenset(
    b"png jpg jpeg gif svg webp avif bmp ico tif tiff heic css scss less js jsx mjs ts tsx map woff woff2 ttf eot "
    b"pdf txt "
    b"html htm xml json yaml yml toml ini cfg conf log csv tsv tgz gz bz2 xz rar jar whl exe dll iso mp3 mp4 wav "
    b"ogg mkv "
    b"avi psd sql tmp bak lock service socket timer target localdomain".split()
)
"""No top-level domains: `logo@2x.png` is no address."""
_ROBOTS = frozenset((b"git", b"hg", b"svn", b"bzr"))
_DOMAIN = r"\.(?:\pL\pL|com|org|net|edu|gov|mil|info|biz)$"


@functools.cache
def compiled(pattern: str, longest: bool = False) -> Any:
    """A pattern for bytes, which finds the first of its alternatives that fits, or the longest."""
    options = re2.Options()
    options.log_errors = False
    options.longest_match = longest
    return re2.compile(pattern.encode(), options)


def without_masks(text: bytes) -> bytes:
    """Return it with a number in place of each mask whose name is a word that speaks for what it masks."""
    return compiled("<?(?:phone|ipv[46]|passport|pl_pesel|in_aadhaar)>").sub(b"0", text) if b">" in text else text


def _matches(pattern: str, text: bytes) -> bool:
    return compiled(pattern).search(text) is not None


def is_email(before: bytes, address: bytes, after: bytes) -> bool:
    """Return whether it is the address of a mailbox, not a handle, a file, a repository or a product of matrices."""
    name, _, domain = address.partition(b"@")
    if before[-1:] in (b"@", b"$") or name in _ROBOTS or domain.rpartition(b".")[2].lower() in _FILES:
        return False
    return after[:1] != b"(" or _matches(_DOMAIN, domain)


def is_ipv4(before: bytes, address: bytes, after: bytes, follows_version: bool) -> bool:
    """Return whether it is an address, not a version; `follows_version`: it comes right after a version."""
    if _matches(_VERSION, before):
        return False
    first, second, third, last = map(int, address.split(b"."))
    if (
        (after[:1] in (b":", b"/") and after[1:2].isdigit())
        or (before[-1:] in (b"@", b"[") and last)
        or before[-3:] == b"://"
    ):
        return True
    named = _matches(_NAMED, before)
    if follows_version or (_matches(_FILE, after) and (named or not _matches(_ADDRESS, before))):
        return False
    if first > 40 or (max(second, third, last) > 99 and second and third):
        return True
    near = before[-48:]
    if _matches(_ADDRESS, near) or _matches(_ADDRESS, after):
        return True
    heading = _matches(_HEADING, before) and _matches(r"^\.?[ \t]+\p{Lu}", after)
    if named or heading or _matches(_OF_VERSIONS, near):
        return False
    name = compiled(_NAME).search(near)
    return name is None or _matches(_NO_NAME, name.group(1))


def joins(between: bytes) -> bool:
    """Return whether two versions that stand around this are of one list or range."""
    return len(between) <= 12 and _matches(_JOINED, between)


def is_number(before: bytes, after: bytes) -> bool:
    """Return whether nothing around it says that a telephone or card number is another number."""
    return not (_matches(OTHER_NUMBER, before) or _matches(_COUNTED, after))


def is_card(before: bytes, after: bytes) -> bool:
    """Return whether it is a card's number, not a part of an address on the web, a file's name or another number."""
    if before[-1:] == b"/" or _matches(_FILE, after) or after[:4].lower() in (b".jpg", b".png", b".htm"):
        return False
    return is_number(before, after) and not (before[-1:] == b"=" and _matches(r"(?:[?&]\w*|(?i:id))=$", before))
