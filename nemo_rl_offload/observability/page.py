"""The frame of every page that needs nothing else: no script of others, no font, no network; light, dark, narrow."""

from collections.abc import Iterable
from html import escape

STYLE = """
:root{color-scheme:light dark;--text:#1f2937;--quiet:#5b6472;--line:#e5e7eb;--back:#fff;--box:#f6f7f9}
@media (prefers-color-scheme:dark){:root{--text:#e5e7eb;--quiet:#a3adba;--line:#374151;--back:#14181f;--box:#1d232c}}
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:56em;padding:0 1em;color:var(--text);
background:var(--back)}
h1{margin-bottom:.2em;overflow-wrap:anywhere}
h2{margin:1.8em 0 .5em;border-bottom:1px solid var(--line);padding-bottom:.2em}
h3{font-size:1em;margin:.2em 0;overflow-wrap:anywhere}figure{margin:0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(24em,100%),1fr));gap:1em 1.5em}
td,th{padding:.25em .9em .25em 0;border-bottom:1px solid var(--line);text-align:left}td{overflow-wrap:anywhere}
.wide{overflow-x:auto}.wide td{overflow-wrap:normal}table{border-collapse:collapse}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
svg text{font-size:11px;fill:var(--quiet)}
svg .grid{stroke:var(--line)}.legend span{margin-right:1.2em;white-space:nowrap;display:inline-block}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}li{overflow-wrap:anywhere}
pre{background:var(--box);padding:1em;overflow:auto;font-size:13px}
pre.prompt,pre.said{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3em 0;padding:.5em 1em}
pre.prompt{color:var(--quiet)}pre.said{margin-bottom:1.2em}.note{color:var(--quiet)}
"""


def framed(title: str, body: Iterable[str], *, script: str = "") -> str:
    """A whole page: its body, and what it does by itself."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'><link rel='icon' href='data:,'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f"{''.join(body)}</main>{script and f'<script>{script}</script>'}</body></html>\n"
    )
