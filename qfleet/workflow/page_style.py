"""The style of a report's page: light and dark, readable when it is enlarged and on a phone, printable."""

POLICY = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
STYLE = """
:root { --ink: #1d2433; --soft: #5b6577; --page: #f6f7f9; --paper: #ffffff; --line: #dde1e8; --blue: #2457c5;
  --band: #2457c52e; --amber: #b25e00; --good: #14713d; --bad: #b3261e; color-scheme: light dark }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --soft: #a4adbd; --page: #12151b; --paper: #1b2028;
  --line: #343b47; --blue: #7da6ff; --band: #7da6ff38; --amber: #ffb35c; --good: #6fd79b; --bad: #ff8a80 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, sans-serif }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 3rem }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 0 0 .8rem }
header p { margin: 0; color: var(--soft); overflow-wrap: anywhere }
.state { display: inline-block; margin-left: .4rem; padding: 0 .6rem; border-radius: 1rem; border: 1px solid;
  font-size: .9rem }
.good { color: var(--good) } .bad { color: var(--bad) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 12rem), 1fr)); gap: .8rem;
  margin: 1.4rem 0 }
.card, section { background: var(--paper); border: 1px solid var(--line); border-radius: .6rem }
.card { padding: .8rem 1rem; display: flex; flex-direction: column }
.card strong { font-size: 1.75rem; line-height: 1.3 } .card span { color: var(--soft); font-size: .9rem }
.card .label { font-weight: 600 }
.verdict { font-size: 1.1rem; margin: 0 0 1.4rem; padding-left: 1rem; border-left: .25rem solid var(--blue) }
section { padding: 1.2rem 1.3rem; margin: 0 0 1rem }
section > p { margin: 0 0 .8rem; overflow-wrap: anywhere }
.wide { overflow-x: auto; margin: 0 0 1rem }
table { border-collapse: collapse; width: 100%; font-size: .95rem }
th { text-align: left; color: var(--soft); font-weight: 600; white-space: nowrap }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td { overflow-wrap: anywhere; min-width: 4rem } tr:last-child td { border-bottom: 0 }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
figure { margin: 0 0 1.4rem } figcaption, .note { color: var(--soft); font-size: .9rem }
svg { display: block; width: 100%; height: auto; max-width: 52rem; font-family: inherit }
.curve { fill: none; stroke: var(--blue); stroke-width: 2; stroke-linejoin: round }
.band { fill: var(--band); stroke: none } .point { fill: var(--blue) } .bar { fill: var(--blue); opacity: .85 }
.grid { stroke: var(--line); stroke-width: 1 } .axis { stroke: var(--soft); stroke-width: 1 }
.mark { stroke: var(--amber); stroke-width: 1.5; stroke-dasharray: 4 3 }
.level { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 2 4 }
.tick, .name { fill: var(--soft); font-size: 12px } .mark-name { fill: var(--amber); font-size: 12px }
.level-name { fill: var(--soft); font-size: 12px }
code { font: .9em ui-monospace, "Cascadia Mono", Menlo, monospace; overflow-wrap: anywhere }
pre { background: var(--page); border: 1px solid var(--line); border-radius: .4rem; padding: .7rem .9rem;
  overflow-x: auto; margin: 0 0 1rem }
pre code { overflow-wrap: normal } details { margin: 0 0 1rem } summary { cursor: pointer; color: var(--soft) }
@media print { body { background: none } section { break-inside: avoid } }
"""
