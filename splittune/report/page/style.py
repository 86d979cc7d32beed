"""How a report looks: colours for light, dark and paper, and widths from a phone's up."""

from __future__ import annotations

# Okabe and Ito's colours, "Color Universal Design", 2008, made lighter or darker until text on them can be read; in
# the dark they are lighter. Order and lightness differ besides, for whoever sees no colours.
_LIGHT = """
--ink:#16202b;--soft:#55636f;--line:#d9dfe5;--page:#f5f7f9;--card:#ffffff;--track:#eef2f5;
--accent:#0a66a8;--tint:#e4f0f9;--warn:#b3401b;
--parameters:#0b5c94;--gradients:#4aa3d8;--optimizer:#7d5fb2;--fixed:#3d7fb6;--rest:#5b6f82;--share:#0c8a66;--whole:#e6a817;
--reserve:#c77a9f;--others:#8b96a1;--tuned:#0a66a8;--even:#c98500;--wait:#dfe5ea;
--on:#fff;--h0:#d5e6f3;--h1:#a3cbe7;--h2:#65a8d6;--h3:#2a80bd;--h4:#0b558c;
"""
_DARK = """
--ink:#e8edf2;--soft:#a3b0bc;--line:#334150;--page:#10171e;--card:#18222c;--track:#232f3b;
--accent:#6cb8f0;--tint:#17324a;--warn:#ff9a73;
--parameters:#3f94d1;--gradients:#8fcbf2;--optimizer:#a98be0;--fixed:#5fa5dc;--rest:#8ea3b7;--share:#2fb98f;--whole:#f2c14a;
--reserve:#dc9abb;--others:#7b8894;--tuned:#6cb8f0;--even:#f0b13a;--wait:#2c3946;
--on:#0d1720;--h0:#22384b;--h1:#2a5678;--h2:#3a7fb3;--h3:#5fabe0;--h4:#b4defb;
"""

# What pictures need, also where they stand alone.
PICTURES = """
.pic{font:12px/1.2 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;
font-variant-numeric:tabular-nums;overflow:visible}
.pic text{fill:var(--ink)}.pic .s{fill:var(--soft)}.pic .b{font-weight:650;font-size:13px}
.pic .e{text-anchor:end}.pic .m{text-anchor:middle}
.pic .grid{stroke:var(--line)}.pic .axis{stroke:var(--soft)}
.pic .track{fill:var(--track);stroke:var(--line)}.pic .need{fill:url(#need);stroke:var(--warn);stroke-opacity:.7}
.pic .parameters{fill:var(--parameters)}.pic .gradients{fill:var(--gradients)}.pic .optimizer{fill:var(--optimizer)}
.pic .fixed{fill:var(--fixed)}.pic .rest{fill:var(--rest)}.pic .share{fill:var(--share)}.pic .whole{fill:var(--whole)}
.pic .reserve{fill:var(--reserve)}.pic .others{fill:url(#others)}.pic .job{fill:var(--fixed)}
.pic .wait{fill:var(--wait)}.pic .copy{fill:var(--whole)}.pic .lack{fill:url(#lack);stroke:var(--warn)}
.pic .on{fill:var(--on);font-weight:600}.pic .dark{fill:#16202b;font-weight:600}
.pic .cut{stroke:var(--card)}
.pic .tuned{stroke:var(--tuned);fill:none;stroke-width:2.5}.pic .even{stroke:var(--even);fill:none;stroke-width:2;
stroke-dasharray:6 4}
.pic .dot{fill:var(--tuned);stroke:var(--card);stroke-width:1.5}.pic .again{fill:var(--card);stroke:var(--tuned);
stroke-width:2}.pic .edot{fill:var(--even);stroke:var(--card);stroke-width:1.5}
.pic .best{fill:none;stroke:var(--ink);stroke-width:2}.pic .base{fill:none;stroke:var(--even);stroke-width:2.5}
.pic .h0{fill:var(--h0)}.pic .h1{fill:var(--h1)}.pic .h2{fill:var(--h2)}.pic .h3{fill:var(--h3)}
.pic .h4{fill:var(--h4)}
"""

_PAGE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;color-scheme:light dark}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1000px;margin:0 auto;padding:32px 24px 48px}
p{margin:.5em 0;max-width:72ch}
code,pre{font:13.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.kicker{color:var(--soft);font-size:14px;margin:0 0 6px;overflow-wrap:anywhere}
h1{font-size:clamp(27px,5vw,42px);line-height:1.12;letter-spacing:-.02em;margin:0 0 10px;text-wrap:balance}
h2{font-size:20px;line-height:1.25;margin:0 0 4px;letter-spacing:-.01em}
.lead{font-size:clamp(16px,2.2vw,19px);color:var(--ink);margin:0 0 22px;max-width:64ch}
.mark{display:inline-block;padding:0 9px;border-radius:99px;background:var(--tint);color:var(--accent);font-size:13px;
font-weight:600;line-height:22px;vertical-align:2px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(205px,1fr));gap:12px;margin:0 0 16px}
.tile,section{background:var(--card);border:1px solid var(--line);border-radius:14px}
.tile{padding:14px 16px}
.tile h2{font-size:13px;font-weight:600;color:var(--soft);letter-spacing:0;margin:0 0 2px}
.tile .big{font-size:22px;font-weight:680;line-height:1.2;letter-spacing:-.015em;overflow-wrap:anywhere}
.tile p{font-size:14px;color:var(--soft);margin:4px 0 0;line-height:1.4}
section{padding:20px 22px 18px;margin:0 0 16px}
section>p{color:var(--soft);margin:0 0 14px}
.why p,.do p{color:var(--ink)}
header section{padding:14px 22px 16px}
pre{background:var(--track);border-radius:9px;padding:12px 14px;margin:10px 0 0;white-space:pre-wrap;
overflow-wrap:anywhere}
figure{margin:0 0 10px}
.pic{display:block}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:0 0 12px;padding:0;
font-size:13px;color:var(--soft)}
.key li{display:flex;align-items:center;gap:6px}
.key svg{flex:none}
table{border-collapse:collapse;width:100%;font-size:13.5px;line-height:1.4}
caption{text-align:left;color:var(--soft);font-size:13px;padding:6px 0}
th{text-align:left;font-weight:600;color:var(--soft);vertical-align:bottom}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--line);overflow-wrap:break-word;vertical-align:top}
th:last-child,td:last-child{padding-right:0}
td.n,th.n{text-align:right}td.n{white-space:nowrap}
td.w,td.t{overflow-wrap:anywhere;min-width:6em}
td.c,th.c{text-align:right;overflow-wrap:anywhere;min-width:6.5em}
tr.best td{background:var(--tint)}
details{margin-top:8px}
.note{font-size:13px;color:var(--soft)}
summary{cursor:pointer;font-size:13.5px;color:var(--accent);font-weight:600;padding:2px 0}
footer{color:var(--soft);font-size:13px;padding:4px 2px}
footer p{max-width:none;margin:2px 0}
@media(max-width:680px){
main{padding:20px 12px 32px}section{padding:16px 14px 14px;border-radius:12px}
.tiles{gap:10px;grid-template-columns:1fr 1fr}.tile{padding:11px 12px}.tile .big{font-size:18px}
header section{padding:12px 14px 14px}
table.stack,table.stack tbody,table.stack caption{display:block}
table.stack thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
table.stack tr{display:grid;grid-template-columns:1fr 1fr;gap:1px 12px;padding:8px 0;
border-bottom:1px solid var(--line)}
table.stack td,table.stack td.n,table.stack td.c{display:block;border:0;padding:1px 0;text-align:left;
white-space:normal;min-width:0}
table.stack td.w{grid-column:1/-1}
table.stack td::before{content:attr(data-l) " ";color:var(--soft);display:block;font-size:11.5px;line-height:1.2}
table.stack tr.best td{background:none}table.stack tr.best td:first-child{font-weight:650;color:var(--accent)}
table.stack td:empty{display:none}
}
@media print{
body{background:#fff;font-size:11pt}main{max-width:none;padding:0}
section,.tile{break-inside:avoid;border-color:#bbb}section.long{break-inside:auto}tr{break-inside:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
summary{display:none}table{font-size:8.5pt}
}
"""

_OUTPUT = """
SCOPE{background:var(--card);color:var(--ink);border:1px solid var(--line);border-radius:12px;padding:14px 18px;
max-width:900px;font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
SCOPE h3{font-size:21px;line-height:1.2;margin:0 0 4px;color:var(--ink)}
SCOPE h4{font-size:15px;margin:14px 0 0;color:var(--ink)}SCOPE p{margin:2px 0 8px;color:var(--soft)}
SCOPE figure{margin:0 0 8px}SCOPE .pic{display:block}
SCOPE .key{display:flex;flex-wrap:wrap;gap:3px 14px;list-style:none;margin:0 0 8px;padding:0;font-size:12.5px}
SCOPE .key li{display:flex;align-items:center;gap:6px;color:var(--soft)}
SCOPE table{border-collapse:collapse;font-size:12.5px;margin:6px 0;background:none;color:var(--ink)}
SCOPE td,SCOPE th{text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid var(--line);background:none}
SCOPE caption{text-align:left;color:var(--soft)}
"""


def page_style() -> str:
    """The style sheet of a page."""
    return _packed(
        f":root{{{_LIGHT}}}@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}{PICTURES}{_PAGE}"
    )


def picture_style() -> str:
    """That of a picture by itself, which stands on white."""
    return _packed(f"svg{{{_LIGHT}}}{PICTURES}")


def fragment_style(scope: str) -> str:
    """That of an output in a notebook, below the class `scope` alone: it keeps its ground whatever the theme is."""
    rules = PICTURES.replace(".pic", f".{scope} .pic") + _OUTPUT.replace("SCOPE", f".{scope}")
    return _packed(f".{scope}{{{_LIGHT}}}{rules}")


def _packed(css: str) -> str:
    return css.replace("\n", "")
