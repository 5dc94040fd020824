"""The style of a profile's page.  Colours have a contrast of at least 3 to 1 with their background, text of 7 to 1."""

STYLE = """
:root { --paper: #ffffff; --ink: #1b1f24; --soft: #4b5563; --rule: #c8ced6; --edge: #57606a;
  --c0: #1f6fb5; --c1: #b4530f; --c2: #13795b; --c3: #9a3f85; --c4: #7d5d00; --c5: #28788c; --c6: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e8eaed; --soft: #b6bdc6; --rule: #3b424b;
  --edge: #98a1ac;
  --c0: #6cb2f0; --c1: #f09a5c; --c2: #5fd0a8; --c3: #e39ad0; --c4: #e0bd52; --c5: #7ccbe0; --c6: #9aa3ad; } }
@media print { :root { --paper: #ffffff; --ink: #000000; --soft: #333333; --rule: #bbbbbb; --edge: #444444;
  --c0: #1f6fb5; --c1: #b4530f; --c2: #13795b; --c3: #9a3f85; --c4: #7d5d00; --c5: #28788c; --c6: #6b7280; }
  section, svg { break-inside: avoid } details > * { display: block } .table { overflow: visible }
  details::details-content { content-visibility: visible; height: auto } h2, h3 { break-after: avoid } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
main { max-width: 60rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem; line-height: 1.2 } h2 { font-size: 1.15rem; margin-top: 2rem } h3 { font-size: 1rem }
p { margin: .4rem 0 }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem;
  max-width: calc(100vw - 2rem); position: sticky; left: 0 }
.table { overflow-x: auto; max-width: 100% } .table:focus-visible, summary:focus-visible { outline: 2px solid var(--c0) }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap }
th { color: var(--soft); font-weight: 600 } td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left }
summary { cursor: pointer; margin: .6rem 0 }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; paint-order: stroke; stroke: var(--paper); stroke-width: 4px }
.grid { stroke: var(--rule); stroke-width: 1 } .axis { stroke: var(--edge); fill: none }
.roof { stroke: var(--ink); stroke-width: 2; fill: none; stroke-dasharray: 6 3 }
.line { fill: none !important; stroke-width: 2 }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: .3rem 0; font-size: .85rem }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; vertical-align: -1px;
  print-color-adjust: exact }
.s0 { fill: var(--c0); stroke: var(--c0) } .key.s0 { background: var(--c0) }
.s1 { fill: var(--c1); stroke: var(--c1) } .key.s1 { background: var(--c1) }
.s2 { fill: var(--c2); stroke: var(--c2) } .key.s2 { background: var(--c2) }
.s3 { fill: var(--c3); stroke: var(--c3) } .key.s3 { background: var(--c3) }
.s4 { fill: var(--c4); stroke: var(--c4) } .key.s4 { background: var(--c4) }
.s5 { fill: var(--c5); stroke: var(--c5) } .key.s5 { background: var(--c5) }
.s6 { fill: var(--c6); stroke: var(--c6) } .key.s6 { background: var(--c6) }
rect.s0, rect.s1, rect.s2, rect.s3, rect.s4, rect.s5, rect.s6 { stroke: var(--paper); stroke-width: .5 }
@media screen and (max-width: 480px) { svg text { font-size: 17px } main { padding: .6rem } }
@media print { table { font-size: 6.5pt } th, td { padding: .1rem .25rem } main { max-width: none; padding: 0 } }
"""
