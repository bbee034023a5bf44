#include "report/style.h"

namespace headloom::report {

// Series colours hold 3:1 against their ground and stay apart for red-green blindness by lightness;
// dashes and labels at the line ends carry the same distinction.
const char* const kStyle = R"css(
:root {
  color-scheme: light dark;
  --ground: #fdfdfb; --raised: #f5f5f1; --ink: #1d2024; --soft: #5c636b; --faint: #8b929a;
  --rule: #dcdcd6; --grid: #e9e9e4; --accent: #1a5fa8; --good: #12714f; --bad: #b03a2e;
  --warn-ground: #fbf3dc; --warn-rule: #d9b44a;
  --c0: #3c4147; --c1: #1766b5; --c2: #c6501a; --c3: #0b8563; --c4: #8455c4; --c5: #9a6c00;
  --c6: #c03a78; --c7: #0f8296; --c8: #647516;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #15171a; --raised: #1d2024; --ink: #e6e7e9; --soft: #a4abb3; --faint: #7a828b;
    --rule: #34383e; --grid: #282c31; --accent: #7db7f2; --good: #5cc79c; --bad: #f08a7d;
    --warn-ground: #2c2717; --warn-rule: #8f7528;
    --c0: #c9cdd2; --c1: #6cb0f2; --c2: #f2915f; --c3: #4fcaa0; --c4: #bb9af2; --c5: #dcae43;
    --c6: #f184b2; --c7: #55c8d8; --c8: #aebf58;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans",
    Arial, sans-serif;
  font-variant-numeric: tabular-nums; text-rendering: optimizeLegibility;
}
main, footer { max-width: 1160px; margin: 0 auto; padding: 0 28px; }
main { padding-top: 44px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; font-weight: 650; margin: 0 0 6px;
  text-wrap: balance; }
h2 { font-size: 21px; line-height: 1.3; letter-spacing: -0.01em; font-weight: 640; margin: 0 0 4px; }
h3 { font-size: 15px; font-weight: 640; margin: 22px 0 6px; }
p { margin: 0 0 10px; max-width: 74ch; text-wrap: pretty; }
code { font: 0.92em/1.4 ui-monospace, SFMono-Regular, "Cascadia Mono", Menlo, Consolas,
  "DejaVu Sans Mono", "Liberation Mono", monospace; }
.eyebrow { font-size: 13px; letter-spacing: 0.04em; color: var(--soft); margin: 0 0 10px; }
.eyebrow b { color: var(--ink); font-weight: 640; }
.soft { color: var(--soft); }
.small { font-size: 13.5px; line-height: 1.5; }
.answer { margin: 26px 0 0; padding: 4px 0 4px 20px; border-left: 3px solid var(--accent); }
.answer p { font-size: 18px; line-height: 1.55; margin: 0 0 14px; }
.answer p:last-child { margin: 0; }
.answer code { font-weight: 600; font-size: 0.9em; }
.banner { background: var(--warn-ground); border: 1px solid var(--warn-rule); border-radius: 6px;
  padding: 9px 14px; margin: 20px 0 0; max-width: none; }
section.task { margin-top: 52px; padding-top: 26px; border-top: 1px solid var(--rule); }
.scroll { overflow-x: auto; margin: 16px 0 0; -webkit-overflow-scrolling: touch; }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; line-height: 1.35; }
caption { text-align: left; color: var(--soft); font-size: 13.5px; padding: 0 0 8px; }
.note { margin-top: 10px; max-width: 96ch; }
th, td { padding: 9px 9px; text-align: right; vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { font-weight: 500; font-size: 13px; color: var(--soft); vertical-align: bottom;
  border-bottom: 1px solid var(--ink); padding-bottom: 7px; }
thead th code { display: inline-block; max-width: 120px; overflow: hidden; text-overflow: ellipsis;
  vertical-align: bottom; }
tbody th { font-weight: 400; }
tbody tr + tr > * { border-top: 1px solid var(--grid); }
.left { text-align: left; }
td small, th small { display: block; font-size: 12px; color: var(--soft); font-weight: 400; }
td.result { font-size: 15px; font-weight: 620; }
td.result small { font-weight: 400; }
td.left small { white-space: normal; max-width: 150px; }
td.wrap { white-space: normal; min-width: 180px; }
td.seeds { padding-top: 7px; padding-bottom: 5px; width: 126px; }
tr.baseline { background: linear-gradient(var(--raised), var(--raised)); }
th.model { text-align: left; background: var(--ground); min-width: 130px; max-width: 230px;
  white-space: normal; overflow-wrap: break-word; }
tr.baseline th.model { background: var(--raised); }
th.model small { max-width: 190px; white-space: normal; }
th.model b { font-weight: 620; }
.better { color: var(--good); } .worse { color: var(--bad); }
.failed { color: var(--bad); }
ul.problems { margin: 14px 0 0; padding-left: 20px; font-size: 14.5px; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 30px 36px;
  margin: 30px 0 0; }
figure { margin: 0; break-inside: avoid; }
figure.wide { grid-column: 1 / -1; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 16px 24px; }
.narrow svg.chart text { font-size: 15px; } .narrow svg.chart .tick { font-size: 14px; }
.links { white-space: nowrap; } .links a { margin-left: 6px; }
a { color: var(--accent); } a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 22px 0 0;
  font-size: 14.5px; }
.answer .limits { font-size: 15px; color: var(--soft); }
.answer .advice { font-weight: 600; }
figcaption { font-size: 13.5px; line-height: 1.45; color: var(--soft); margin-top: 4px; }
figcaption b { color: var(--ink); font-weight: 600; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg.swatch { display: inline-block; width: 26px; height: 10px; margin-right: 9px; vertical-align: 1px; }
svg.strip { width: 126px; height: 22px; }
svg text { font-size: 12px; fill: var(--soft); }
svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
svg .tick { fill: var(--faint); font-size: 11.5px; }
svg .note { font-size: 11.5px; font-style: italic; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--faint); }
svg .arrow { fill: var(--c); } svg .mark { fill: none; stroke: var(--c); stroke-width: 1.8; }
svg .floor { fill: none; stroke: var(--faint); stroke-dasharray: 1 3; }
svg .line { fill: none; stroke: var(--c); stroke-width: 2; stroke-dasharray: var(--d);
  stroke-linejoin: round; }
svg .broken { stroke-width: 1.2; opacity: 0.75; }
svg .cross { fill: none; stroke: var(--c); stroke-width: 1.8; }
svg .band { fill: var(--c); opacity: 0.15; }
svg.many .band { opacity: 0.07; }
svg .leader { fill: none; stroke: var(--c); stroke-width: 1; opacity: 0.4; }
svg .label { fill: var(--c); font-weight: 560; }
svg .label, svg .note { paint-order: stroke; stroke: var(--ground); stroke-width: 3px; stroke-linejoin: round; }
svg .thin { stroke-width: 1; opacity: 0.6; }
.plot { position: relative; }
.plot input { appearance: none; position: absolute; width: 16px; height: 16px; margin: -8px 0 0 -8px;
  padding: 0; border: 0; border-radius: 50%; background: transparent; font-family: inherit; }
.plot input:hover, .plot input:focus-visible { z-index: 2; outline: 2px solid var(--ground);
  box-shadow: inset 0 0 0 3px var(--c); }
.plot input:focus-visible { z-index: 3; }
.plot input:hover::after, .plot input:focus-visible::after { content: attr(aria-label);
  position: absolute; left: 14px; bottom: 18px; width: max-content; max-width: min(240px, 38vw);
  padding: 4px 9px; border: 1px solid var(--c); border-radius: 5px; background: var(--ground);
  color: var(--ink); font-size: 13px; line-height: 1.35; text-align: left; overflow-wrap: anywhere;
  pointer-events: none; }
.plot input.left::after { left: auto; right: 14px; }
svg .bubble { fill: var(--c); fill-opacity: 0.16; stroke: var(--c); }
svg .ring { fill: none; stroke: var(--c); } svg .dot { fill: var(--c); }
svg .whisker { stroke: var(--c); stroke-width: 1.5; }
svg .reference { stroke: var(--faint); stroke-dasharray: 2 2; }
svg .spread { fill: var(--c); opacity: 0.2; }
svg .seed { fill: none; stroke: var(--c); stroke-width: 1.3; }
svg .mean { stroke: var(--c); stroke-width: 2; }
.s0 { --c: var(--c0); --d: none; } .s1 { --c: var(--c1); --d: none; }
.s2 { --c: var(--c2); --d: 7 3; } .s3 { --c: var(--c3); --d: 2 2.5; }
.s4 { --c: var(--c4); --d: 10 3 2 3; } .s5 { --c: var(--c5); --d: 5 2; }
.s6 { --c: var(--c6); --d: 1 3; } .s7 { --c: var(--c7); --d: 12 4; }
.s8 { --c: var(--c8); --d: 6 3 1 3; } .s9 { --c: var(--c1); --d: 3 4; }
.s10 { --c: var(--c2); --d: 14 3 3 3; } .s11 { --c: var(--c3); --d: 8 5; }
.s12 { --c: var(--c4); --d: 2 5; }
section.more { margin-top: 56px; padding-top: 20px; border-top: 1px solid var(--rule); }
details { border-bottom: 1px solid var(--rule); }
summary { cursor: pointer; padding: 11px 0; font-weight: 560; }
summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
summary .soft { font-weight: 400; font-size: 14px; }
details > :not(summary) { margin-bottom: 16px; }
pre { background: var(--raised); border-radius: 6px; padding: 12px 16px; overflow-x: auto; margin: 0;
  font-size: 13.5px; line-height: 1.5; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; font-size: 14.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
footer { color: var(--faint); font-size: 13px; padding-top: 28px; padding-bottom: 44px; }
@media screen and (max-width: 700px) {
  main, footer { padding-left: 18px; padding-right: 18px; }
  main { padding-top: 26px; }
  h1 { font-size: 25px; }
  .answer { padding-left: 14px; } .answer p { font-size: 17px; line-height: 1.5; }
  .figures { grid-template-columns: minmax(0, 1fr); }
  svg.chart text { font-size: 14px; } svg.chart .tick, svg.chart .note { font-size: 13px; }
  th.model { position: sticky; left: 0; z-index: 1; padding-right: 12px; }
  th.model small { max-width: 130px; }
  table.results, .results tbody, .results tr, .results th, .results td { display: block; width: auto; }
  .results thead { display: none; } .results caption { display: block; }
  .results tr { padding: 8px 0; } .results tbody tr + tr { border-top: 1px solid var(--rule); }
  .results tbody tr > * { border: 0; }
  .results th.model { position: static; max-width: none; padding: 2px 0; }
  .results th.model small { max-width: none; }
  .results td { display: grid; grid-template-columns: 108px minmax(0, 1fr); padding: 2px 0;
    text-align: left; white-space: normal; }
  .results td::before { content: attr(data-label); color: var(--soft); font-weight: 400;
    font-size: 13px; grid-row: 1 / span 2; overflow-wrap: anywhere; white-space: pre-line; }
  .results td small { grid-column: 2; max-width: none; } .results td:empty { display: none; }
  .results td.seeds, .note .seeds { display: none; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; }
}
@media print {
  :root { color-scheme: light; --ground: #fff; --raised: #f4f4f4; --ink: #000; --soft: #444;
    --faint: #777; --rule: #ccc; --grid: #e4e4e4; --accent: #1a5fa8; --good: #12714f; --bad: #b03a2e;
    --warn-ground: #fff; --c0: #3c4147; --c1: #1766b5; --c2: #c6501a; --c3: #0b8563; --c4: #8455c4;
    --c5: #9a6c00; --c6: #c03a78; --c7: #0f8296; --c8: #647516; }
  body { font-size: 10.5pt; } main, footer { max-width: none; padding: 0; }
  nav, .links, .plot input { display: none; }
  .scroll { overflow: visible; } table { font-size: 8pt; } th, td { padding: 4px 6px; }
  td.result { font-size: 9pt; } td small, th small { font-size: 7pt; }
  td.seeds, thead th.seeds, .note .seeds { display: none; }
  h2, h3 { break-after: avoid; } tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; height: auto; }
  pre { white-space: pre-wrap; }
}
)css";

}  // namespace headloom::report
