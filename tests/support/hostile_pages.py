"""Pages that attack a parser of HTML: deep, unclosed, repeated, with attributes or entities without end."""

HOSTILE = [
    "<div>" * 100_000 + "hello" + "</div>" * 100_000,
    "<table><tr><td>" * 30_000 + "hello",
    "<b><p>" * 30_000 + "hello",
    "<!--" * 50_000,
    "&" * 100_000 + "hello",
    "\0" * 50_000 + "<p>hel\0lo",
    "<svg><math>" * 20_000,
    "<![CDATA[" * 50_000,
    "<div class='" + "nav " * 50_000 + "'>hello",
    "<html><body>" + "<p>Some words in a paragraph " * 100_000,
    "<script>" * 100_000 + "<title>" * 100_000 + "x",
    "<b>" * 100_000 + "</i></b></a>" * 50_000,
    "<td>" * 1000 + "</table></td>" * 50_000 + "x",
    "<p " + " ".join(f"a{i}" for i in range(50_000)) + ">x",
    "".join(f"<body b{i}>" for i in range(5000)) + "x",
    "<ul><li>x" * 30_000,
    f'<p style="{":" * 100_000}">x' * 5,
    "<meta content=" * 50_000 + "<p>x",
    '"@type"' * 50_000 + "&nGt;" * 100_000,
    "<li>" * 60 + "<i>" * 60_000 + "<li>" * 60_000 + "x",
]
