#include "analysis/maps_script.h"

namespace headloom::analysis {

const char* const kMapsStyle = R"css(
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.controls { display: flex; flex-wrap: wrap; gap: 12px 20px; margin: 22px 0 0; padding: 0; border: 0; }
.controls label { display: grid; gap: 3px; font-size: 13px; color: var(--soft); }
select { font: inherit; font-size: 15px; color: var(--ink); background: var(--raised);
  border: 1px solid var(--rule); border-radius: 6px; padding: 6px 8px; max-width: 100%; }
select:focus-visible, button:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.tokens { border: 0; padding: 0; margin: 24px 0 0; line-height: 2.1; min-width: 0; }
.tokens legend, .maps h2 { font-size: 15px; font-weight: 640; padding: 0; margin: 0 0 4px; }
.tokens label { position: relative; display: inline-block; }
.tokens input { position: absolute; inset: 0; width: 100%; height: 100%; margin: 0; opacity: 0;
  cursor: pointer; }
.tokens span { display: inline-block; white-space: pre; min-width: 10px; text-align: center;
  padding: 0 2px; margin: 0 1px; line-height: 1.6; border-radius: 3px; border-bottom: 2px solid transparent;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 14px; background: var(--shade, transparent); color: var(--ink); }
.tokens input:hover + span { border-bottom-color: var(--faint); }
.tokens input:checked + span { border-bottom-color: var(--c2); font-weight: 700; }
.tokens input:focus-visible + span { outline: 2px solid var(--accent); outline-offset: 1px; }
.said { min-height: 3em; margin: 14px 0 0; }
.maps { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 30px 36px;
  margin: 22px 0 0; align-items: start; }
.maps canvas { display: block; width: 100%; max-width: 520px; aspect-ratio: 1; image-rendering: pixelated;
  border: 1px solid var(--rule); cursor: crosshair; touch-action: manipulation; }
.scale { font-size: 13px; color: var(--soft); display: flex; gap: 8px; align-items: center; margin: 8px 0 0; }
.scale i { display: inline-block; width: 120px; height: 10px; border-radius: 2px;
  background: linear-gradient(to right, var(--c2), var(--ground) 50%, var(--c1)); border: 1px solid var(--rule); }
.scale.positive i { background: linear-gradient(to right, var(--ground), var(--c1)); }
td button, th button { font: inherit; color: var(--accent); background: none; border: 0; padding: 0;
  text-decoration: underline; cursor: pointer; white-space: pre; }
table.square { width: auto; font-size: 12.5px; }
table.square th, table.square td { padding: 3px 6px; text-align: right; min-width: 44px; }
tr.chosen > * { background: var(--raised); }
section.block { min-width: 0; } section.wide { grid-column: 1 / -1; }
table.kinds .group { text-align: center; border-bottom: 0; padding-bottom: 0; }
@media screen and (max-width: 700px) {
  .maps { grid-template-columns: minmax(0, 1fr); }
  table.kinds th:first-child { position: sticky; left: 0; background: var(--ground); padding-right: 10px; }
  .controls label, .controls select { width: 100%; }
  .tokens span { font-size: 15px; padding: 2px 3px; }
}
@media print { .controls { display: none; } }
)css";

const char* const kMapsBody = R"html(
<noscript><p class="banner">This page draws its maps with a script that is part of the file. Please allow it.</p></noscript>
<fieldset class="controls"><legend class="hidden">What is shown</legend>
<label>Layer<select id="layer"></select></label>
<label>Map<select id="map"></select></label>
<label>Head<select id="head"></select></label>
</fieldset>
<fieldset class="tokens"><legend>The query: choose a token</legend><div id="tokens"></div></fieldset>
<fieldset class="tokens" id="keys" hidden><legend>What it reads</legend><div id="source"></div></fieldset>
<p class="said" id="said" role="status" aria-live="polite"></p>
<div class="maps">
<section class="block" aria-labelledby="whole"><h2 id="whole">The whole map</h2>
<canvas id="picture" role="img"></canvas>
<p class="scale" id="scale"><span id="low"></span><i></i><span id="high"></span></p>
<p class="soft small">A row is a query, a column a key. The outlined row is the query chosen above; choose another by a click.</p></section>
<section class="block" id="composed" aria-labelledby="mixing"><h2 id="mixing">How heads are composed here</h2>
<label class="soft small">of <select id="stage"></select></label>
<p class="soft small" id="pair"></p>
<div class="scroll" role="region" tabindex="0" aria-label="Composition map"><table class="square" id="square"></table></div></section>
<section class="block wide" aria-labelledby="top"><h2 id="top">What the query sees</h2>
<div class="scroll" role="region" tabindex="0" aria-label="The keys whose values are largest in size"><table id="list" class="kinds"></table></div></section>
<section class="block" aria-labelledby="states"><h2 id="states">The query's hidden state</h2>
<div class="scroll" role="region" tabindex="0" aria-label="Size of the hidden state after each layer"><table id="hidden"></table></div></section>
</div>
)html";

const char* const kMapsScript = R"js(
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);

// float16 from base64.
function unpack(packed) {
  if (packed.values) return packed.values;
  const bytes = Uint8Array.from(atob(packed.data), c => c.charCodeAt(0));
  const halves = new Uint16Array(bytes.buffer, 0, bytes.length >> 1);
  const values = new Float32Array(halves.length);
  for (let i = 0; i < halves.length; ++i) {
    const h = halves[i], sign = h & 0x8000 ? -1 : 1, power = h >> 10 & 31, part = h & 1023;
    values[i] = sign * (power === 0 ? part * 2 ** -24 : power === 31 ? (part ? NaN : Infinity)
      : (1 + part / 1024) * 2 ** (power - 15));
  }
  packed.data = "";
  return packed.values = values;
}

let panel = data.panels[0], map = null, query = 0, key = -1;
const rowTexts = () => data[panel.rows];
const columnTexts = () => {
  const texts = data[panel.columns];
  return !map.projected ? texts
    : Array.from({length: map.shape[2]}, (_, i) => "projection " + i);
};

// Head "mean" is the mean over heads.
function value(m, head, t, s) {
  const [heads, rows, columns] = m.shape, values = unpack(m);
  if (head !== "mean") return head < heads ? values[(head * rows + t) * columns + s] : NaN;
  let sum = 0;
  for (let h = 0; h < heads; ++h) sum += values[(h * rows + t) * columns + s];
  return sum / heads;
}
const headText = (m, i) => "head " + m.heads[i] + (m.each > 1 ? ", map " + (1 + i % m.each) : "");
// The maps of m that belong to the chosen one.
const placesIn = (m, head) => head === "mean" || m.each === map.each ? [head]
  : Array.from({length: m.each}, (_, i) => Math.floor(head / map.each) * m.each + i);
const headNow = () => at("head").value === "mean" ? "mean" : Number(at("head").value);
const shown = (x, m) => !isFinite(x) ? (x < 0 ? "hidden" : "–")
  : m && !m.scores && m.name !== "map" && Math.abs(x) <= 1.5 ? (100 * x).toFixed(1).replace(/^-(0\.0)$/, "$1") + "%"
  : Math.abs(x) >= 1e-3 || x === 0 ? x.toPrecision(3) : x.toExponential(1);
const named = (texts, i) => i + " “" + texts[i] + "”";

function options(select, items) {
  const before = select.value;
  select.replaceChildren(...items.map(([value, label]) => new Option(label, value)));
  if (items.some(([value]) => String(value) === before)) select.value = before;
}

// Limits of what is shown of the chosen map.
function limits(head) {
  let low = 0, high = 0;
  for (let t = 0; t < map.shape[1]; ++t) for (let s = 0; s < map.shape[2]; ++s) {
    const x = value(map, head, t, s);
    if (isFinite(x)) { low = Math.min(low, x); high = Math.max(high, x); }
  }
  return [low, high];
}

function colour(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const n = parseInt(text.length === 4 ? text.slice(1).replace(/./g, "$&$&") : text.slice(1), 16);
  return [n >> 16 & 255, n >> 8 & 255, n & 255];
}
// From the ground to one colour for values above 0, to another below.
function shade(x, largest) {
  const ground = colour("--ground"), to = colour(x < 0 ? "--c2" : "--c1");
  const part = largest > 0 && isFinite(x) ? Math.min(Math.abs(x) / largest, 1) ** 0.6 : 0;
  return ground.map((g, i) => Math.round(g + (to[i] - g) * part));
}

function draw() {
  const [heads, rows, columns] = map.shape, head = headNow(), [low, high] = limits(head);
  const largest = Math.max(-low, high), texts = rowTexts(), others = columnTexts();
  const self = panel.rows === panel.columns && !map.projected;
  const row = Array.from({length: columns}, (_, s) => value(map, head, query, s));
  const rowLargest = row.reduce((m, x) => isFinite(x) ? Math.max(m, Math.abs(x)) : m, 0);
  const order = row.map((x, s) => s).filter(s => isFinite(row[s]) && row[s] !== 0)
    .sort((a, b) => Math.abs(row[b]) - Math.abs(row[a]));
  if (key < 0 || key >= columns || !isFinite(row[key])) key = order.length ? order[0] : 0;
  // Tokens are shaded by what the query gives them.
  const targets = document.querySelectorAll((self ? "#tokens" : "#source") + " span");
  targets.forEach((span, s) => {
    const seen = s < columns && isFinite(row[s]) && row[s] !== 0;
    const mix = Math.round(70 * (seen ? (Math.abs(row[s]) / (rowLargest || 1)) ** 0.6 : 0));
    span.style.setProperty("--shade", mix ?
      `color-mix(in srgb, var(${row[s] < 0 ? "--c2" : "--c1"}) ${mix}%, var(--ground))` : "transparent");
  });
  const chosen = head === "mean" ? "mean of the heads" : headText(map, head);
  at("said").textContent = panel.name + ", " + map.label + ", " + chosen + ": token " +
    named(texts, query) + (order.length ? " has " + order.slice(0, 3).map(s =>
      shown(row[s], map) + " on " + named(others, s)).join(", ") + "." : " sees nothing here.");
  // The whole map.
  const canvas = at("picture"), edge = Math.max(1, Math.floor(520 / Math.max(rows, columns)));
  canvas.width = columns * edge; canvas.height = rows * edge;
  canvas.style.aspectRatio = columns + " / " + rows;
  canvas.setAttribute("aria-label", "Map of " + rows + " queries and " + columns + " keys; " + at("said").textContent);
  const context = canvas.getContext("2d"), hidden = colour("--raised");
  for (let t = 0; t < rows; ++t) for (let s = 0; s < columns; ++s) {
    const x = value(map, head, t, s), c = isFinite(x) ? shade(x, largest) : hidden;
    context.fillStyle = `rgb(${c})`;
    context.fillRect(s * edge, t * edge, edge, edge);
  }
  context.strokeStyle = `rgb(${colour("--c2")})`;
  context.lineWidth = Math.min(3, Math.max(1.5, edge / 6));
  context.strokeRect(0.75, query * edge + 0.75, columns * edge - 1.5, edge - 1.5);
  at("scale").className = low < 0 ? "scale" : "scale positive";
  at("low").textContent = low < 0 ? shown(-largest, map) : "0";
  at("high").textContent = shown(largest, map);
  list(order.slice(0, 10), others, head);
  compose(texts, others);
  states();
}

const cell = (tag, text, css) => {
  const one = document.createElement(tag);
  if (css) one.className = css;
  one.append(text);
  return one;
};
function line(cells) { const row = document.createElement("tr"); row.append(...cells); return row; }
function fill(table, caption, head, rows, groups) {
  const top = document.createElement("thead"), body = document.createElement("tbody");
  if (groups) top.append(line(groups));
  top.append(line(head)); body.append(...rows);
  const title = document.createElement("caption");
  title.append(caption);
  table.replaceChildren(title, top, body);
}
const column = (text, css) => { const th = cell("th", text, css); th.scope = "col"; return th; };

// Every map of the layer, at the keys that matter in the chosen one.
function list(keys, texts, head) {
  const same = panel.maps.filter(m => m.projected === map.projected)
    .map(m => ({of: m, places: placesIn(m, head)}));
  fill(at("list"), "The keys whose values in “" + map.label + "” are largest in size",
    [column("key", "left"), ...same.flatMap(m =>
      m.places.map((_, i) => column(m.of.short + (m.places.length > 1 ? " " + (i + 1) : ""))))],
    keys.map(s => {
      const button = cell("button", named(texts, s));
      button.type = "button";
      button.addEventListener("click", () => { key = s; draw(); });
      const first = cell("th", button, "left");
      first.scope = "row";
      const row = line([first, ...same.flatMap(m =>
        m.places.map(i => cell("td", shown(value(m.of, i, query, s), m.of))))]);
      if (s === key) row.className = "chosen";
      return row;
    }), [cell("td", ""), ...[true, false].map(scores => {
      const own = same.filter(m => m.of.scores === scores).reduce((n, m) => n + m.places.length, 0);
      const th = cell("th", own ? scores ? "scores" : "weights" : "", "group");
      th.colSpan = own; th.scope = "colgroup";
      return own ? th : null;
    }).filter(th => th)]);
}

// The composition map of the chosen pair.
function compose(texts, others) {
  const stages = panel.composition;
  at("composed").hidden = !stages.length;
  if (!stages.length) return;
  const one = stages[Math.min(Number(at("stage").value) || 0, stages.length - 1)];
  const [from, to] = one.map_static.shape, sum = Array.from(unpack(one.map_static));
  for (const [part, place] of [["map_query", query], ["map_key", key]]) {
    if (!one[part] || place >= one[part].shape[0]) continue;
    const values = unpack(one[part]), first = place * from * to;
    for (let i = 0; i < from * to; ++i) sum[i] += values[first + i];
  }
  at("pair").textContent = "Query " + named(texts, query) + ", key " + named(others, key) +
    ": what the map of a row's head gives to the head of a column.";
  const largest = Math.max(...sum.map(Math.abs));
  fill(at("square"), "Composition map", [column("head", "left"), ...Array.from({length: to}, (_, j) => column(String(j)))],
    Array.from({length: from}, (_, i) => {
      const head = cell("th", String(i), "left");
      head.scope = "row";
      return line([head, ...Array.from({length: to}, (_, j) => {
        const x = sum[i * to + j], td = cell("td", x.toFixed(2));
        td.style.background = `color-mix(in srgb, var(${x < 0 ? "--c2" : "--c1"}) ${
          Math.round(55 * Math.abs(x) / (largest || 1))}%, var(--ground))`;
        return td;
      })]);
    }));
}

function states() {
  const own = data.hidden.filter(h => h.rows === panel.rows);
  fill(at("hidden"), "Root mean square of token " + named(rowTexts(), query) + " after each layer",
    [column("layer", "left"), column("root mean square")], own.map(h => {
      const name = cell("th", h.name, "left");
      name.scope = "row";
      return line([name, cell("td", shown(h.rms[query]))]);
    }));
}

function tokens(box, texts, choose) {
  box.replaceChildren(...texts.map((text, i) => {
    const label = document.createElement("label"), span = cell("span", text === "" ? " " : text);
    if (choose) {
      const input = document.createElement("input");
      input.type = "radio"; input.name = "query"; input.value = i; input.checked = i === query;
      input.setAttribute("aria-label", "token " + named(texts, i));
      input.addEventListener("change", () => { query = i; key = -1; draw(); });
      label.append(input);
    }
    label.append(span);
    return label;
  }));
}

function chooseLayer() {
  panel = data.panels[Number(at("layer").value)];
  const before = map && map.name;
  options(at("map"), panel.maps.map((m, i) => [i, m.label]));
  const same = panel.maps.findIndex(m => m.name === before);
  at("map").value = same >= 0 ? same : panel.maps.length - 1;
  options(at("stage"), panel.composition.map((c, i) => [i, c.stage]));
  query = Math.min(query, rowTexts().length - 1);
  tokens(at("tokens"), rowTexts(), true);
  chooseMap();
}
function chooseMap() {
  const next = panel.maps[Number(at("map").value)];
  // The chosen head stays, of which the other map may have fewer parts or more.
  const kept = map && at("head").value ? Math.floor(headNow() / map.each) * next.each : NaN;
  map = next;
  options(at("head"), [...map.heads.map((_, i) => [i, headText(map, i)]), ["mean", "mean of the heads"]]);
  if (kept < map.heads.length) at("head").value = kept;
  const self = panel.rows === panel.columns && !map.projected;
  at("keys").hidden = self;
  if (!self) tokens(at("source"), columnTexts(), false);
  key = -1;
  draw();
}

options(at("layer"), data.panels.map((p, i) => [i, p.name + " (" + p.mixer + ")"]));
query = data[panel.rows].length - 1;
at("layer").addEventListener("change", chooseLayer);
at("map").addEventListener("change", chooseMap);
at("head").addEventListener("change", draw);
at("stage").addEventListener("change", draw);
at("picture").addEventListener("click", event => {
  const box = event.target.getBoundingClientRect();
  const row = Math.floor((event.clientY - box.top) / box.height * map.shape[1]);
  query = Math.max(0, Math.min(row, map.shape[1] - 1));
  key = -1;
  document.querySelectorAll("#tokens input")[query].checked = true;
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
chooseLayer();
)js";

}  // namespace headloom::analysis
