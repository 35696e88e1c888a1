// The page of the dashboard. Texts of views may be anybody's: they only ever become text nodes.
"use strict";

const POLL_MS = 2000, PAGE_ROWS = 50;
const CAUSES = ["scheduler", "network", "disk", "tokenize", "decode", "device", "queue"];
const TITLES = { workers: "Workers", nodes: "Data nodes", datasets: "Datasets", peers: "Sent to", stages: "Stages", members: "Jobs of the array", tasks: "Running tasks", attempts: "Attempts that failed", rules: "Rules", dropped: "Dropped, by reason" };
const GOOD = ["running", "working", "up", "done", "ended"], BAD = ["silent", "lost", "revoked", "failed", "incomplete", "does not answer"];
const $ = (id) => document.getElementById(id);
const tables = {}; // By name: the key that it is sorted by, the direction, the first row that is shown, a filter.
let view = null, points = [], times = [], pinned = null, player = null, shownSamples = "";

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function scaled(value, units, base) {
  let n = value, i = 0;
  while (Math.abs(n) >= base && i < units.length - 1) { n /= base; i++; }
  return `${n >= 100 || i === 0 ? Math.round(n) : n.toPrecision(3)}${units[i] ? " " + units[i] : ""}`;
}

function duration(s) {
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.round(s / 3600);
  return hours < 48 ? `${hours} h` : `${Math.round(s / 86400)} days`;
}

function format(value, unit) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "string") return value;
  if (unit === "share") return `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
  if (unit === "s") return duration(value);
  if (unit === "id") return String(value);
  if (unit === "B") return scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);
  if (unit === "B/s") return `${scaled(value, ["B", "kB", "MB", "GB"], 1000)}/s`;
  if (unit) return `${scaled(value, ["", "k", "M", "G"], 1000)} ${unit}`;
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toLocaleString("en", { maximumFractionDigits: 1 });
}

function clock(at) { return new Date(1000 * at).toLocaleTimeString([], { hour12: false }); }

function tone(state) { return GOOD.includes(state) ? "good" : BAD.includes(state) ? "bad" : "warn"; }

function show(id, isShown) { $(id).hidden = !isShown; return isShown; }

function render() {
  const v = view, p = v.progress;
  $("title").textContent = v.title || "Forebay";
  $("state").textContent = v.state;
  $("state").className = `badge ${tone(v.state)}`;
  $("updated").textContent = `${pinned === null ? "updated" : "recorded"} ${clock(v.at)}`;
  if (show("error", Boolean(v.error))) $("error").textContent = v.error;
  if (show("message", Boolean(v.message))) $("message").textContent = v.message;
  document.title = `${p && p.total ? format(p.done / p.total, "share") + " · " : ""}${v.title || "Forebay"}`;
  if (show("progress", Boolean(p && p.total))) renderProgress(p);
  $("figures").replaceChildren(...Object.entries(v.figures || {}).map(([label, [value, unit]]) =>
    el("div", {}, el("dt", {}, label), el("dd", {}, format(value, unit)))));
  if (show("waits", Boolean((v.workers || []).length) && v.kind !== "run")) renderWaits(v.waits || {});
  if (show("history", points.some((point) => point.rate !== null))) renderHistory();
  if (show("coverage", Boolean(v.coverage))) renderCoverage();
  for (const name of Object.keys(v.columns || {})) renderTable(name, v[name] || [], v.columns[name]);
  const key = JSON.stringify(v.samples || "");
  if (show("samples", Boolean(v.samples)) && key !== shownSamples) renderSamples(v.samples);
  shownSamples = key;
  if (show("events", Boolean(v.events))) $("events-list").replaceChildren(...v.events.map((event) =>
    el("li", { class: event.level === "error" ? "bad" : event.level === "warning" ? "warn" : "" },
      el("time", {}, event.at ? clock(event.at) : "now"), event.text)));
  if (show("uses", Boolean(v.uses))) $("uses-list").replaceChildren(...v.uses.map((use) =>
    el("li", {}, el("time", {}, clock(use.at)), `${use.worker}, step ${use.step}: ${use.samples.toLocaleString("en")} samples of slice${use.slices.length === 1 ? "" : "s"} ${use.slices.join(", ")}, epoch ${use.epoch + 1}`)));
}

function renderProgress(p) {
  const share = p.done / p.total;
  const parts = [`${format(share, "share")}`, p.unit === "B" ? `${format(p.done, "B")} of ${format(p.total, "B")}` : `${format(p.done, "")} of ${format(p.total, "")} ${p.unit}`];
  if (p.epochs) parts.push(`epoch ${p.epoch} of ${p.epochs}`);
  if (p.stage) parts.push(`stage ${p.stage}`);
  if (p.eta_s) parts.push(`about ${duration(p.eta_s)} to go`);
  const fill = el("div");
  fill.style.width = `${100 * Math.min(1, share)}%`;
  $("progress").replaceChildren(el("strong", {}, parts[0]), ` ${parts.slice(1).join(" · ")}`,
    el("div", { class: "bar", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share), "aria-label": "Progress" }, fill));
}

function renderWaits(waits) {
  const busy = Math.max(0, 1 - Object.values(waits).reduce((a, b) => a + b, 0));
  const shares = [...CAUSES.filter((cause) => waits[cause]).map((cause) => [cause, waits[cause]]), ["busy", busy]];
  $("waits-bar").replaceChildren(...shares.map(([cause, share]) => {
    const part = el("div", { class: `c-${cause}` });
    part.style.width = `${100 * share}%`;
    return part;
  }));
  const texts = shares.map(([cause, share]) => `${cause === "busy" ? "training" : `waiting: ${cause}`} ${format(share, "share")}`);
  $("waits-bar").setAttribute("aria-label", texts.join(", "));
  $("waits-legend").replaceChildren(...shares.map(([cause], i) => el("li", {}, el("i", { class: `c-${cause}` }), texts[i])));
  $("advice").textContent = view.advice || "";
}

function renderHistory() {
  const rates = points.filter((point) => point.rate !== null).map((point) => [point.at, point.rate]);
  const unit = points.findLast((point) => point.rate !== null).unit, charts = [[`Throughput, ${unit}`, [["throughput", rates]], unit, null]];
  const causes = CAUSES.filter((cause) => points.some((point) => point.waits[cause] >= 0.005));
  if (view.kind !== "preparation" && view.kind !== "run") charts.push(["Waiting, of the time of the workers", [
    ["all", points.map((point) => [point.at, Object.values(point.waits).reduce((a, b) => a + b, 0)])],
    ...causes.map((cause) => [cause, points.map((point) => [point.at, point.waits[cause] || 0])])], "share", 1]);
  const width = $("charts").clientWidth, shown = charts.length > 1 && width >= 700 ? (width - 24) / 2 : width;
  $("charts").replaceChildren(...charts.map((each) => chart(shown, ...each)));
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Ticks at round numbers, from 0 to the first that is not below the largest value.
function ticks(max) {
  const rough = max / 4, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  return Array.from({ length: Math.ceil(max / step - 0.001) + 1 }, (_, i) => i * step);
}

function tick(value, unit) {
  if (unit === "share") return `${Math.round(100 * value)} %`;
  return /^B/.test(unit) ? format(value, unit) : scaled(value, ["", "k", "M", "G"], 1000).replace(/\.0+(?= |$)|(\.\d*?)0+(?= |$)/, "$1");
}

// A chart with axes. Lines differ in colour and in dashes; the legend has both, and their values now.
function chart(width, title, series, unit, top) {
  const height = 180, left = 60, bottom = 156, right = width - 12, largest = Math.max(...series.flatMap(([, pairs]) => pairs.map(([, y]) => y)), 1e-9);
  const levels = ticks(top ?? largest), max = levels.at(-1), start = Math.min(...series.map(([, pairs]) => pairs[0][0])), span = Math.max(1, series[0][1].at(-1)[0] - start);
  const x = (at) => left + (right - left) * (at - start) / span, y = (value) => bottom - (bottom - 8) * Math.min(1, value / max);
  const times = Array.from({ length: width < 480 ? 2 : 4 }, (_, i, n = width < 480 ? 1 : 3) => start + span * i / n);
  const text = `${title} in ${duration(span)}: ${series.map(([name, pairs]) => `${name} now ${format(pairs.at(-1)[1], unit)}, at most ${format(Math.max(...pairs.map(([, value]) => value)), unit)}`).join("; ")}`;
  const picture = svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": text },
    ...levels.map((level) => svg("g", {}, svg("line", { x1: left, x2: right, y1: y(level), y2: y(level) }), svg("text", { x: left - 8, y: y(level) + 4, "text-anchor": "end" }, tick(level, unit)))),
    ...times.map((at, i) => svg("text", { x: x(at), y: height - 6, "text-anchor": i === 0 ? "start" : i === times.length - 1 ? "end" : "middle" }, clock(at))),
    ...series.map(([name, pairs]) => svg("path", { class: `l-${name}`, d: pairs.map(([at, value], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("") })));
  const legend = series.map(([name, pairs]) => el("li", {}, svg("svg", { class: "chart key", width: 28, height: 10, "aria-hidden": "true" }, svg("path", { class: `l-${name}`, d: "M0 5H28" })), `${name} ${format(pairs.at(-1)[1], unit)}`));
  return el("figure", {}, el("figcaption", {}, title), picture, el("ul", { class: "legend" }, ...legend));
}

let cellSize = 0, cellColumns = 0;

function renderCoverage() {
  const { used, state, slices_per_cell: per } = view.coverage, canvas = $("cells"), style = getComputedStyle(document.documentElement);
  const width = canvas.parentElement.clientWidth - 32, ratio = window.devicePixelRatio || 1, gap = 1;
  cellSize = Math.max(6, Math.min(22, Math.floor(Math.sqrt(width * 150 / used.length))));
  cellColumns = Math.max(1, Math.floor(width / cellSize));
  const height = Math.ceil(used.length / cellColumns) * cellSize;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d"), colour = (name) => style.getPropertyValue(name).trim();
  const free = colour("--free"), full = colour("--used"), leased = colour("--leased"), aside = colour("--bad");
  context.scale(ratio, ratio);
  for (let i = 0; i < used.length; i++) {
    const x = (i % cellColumns) * cellSize, y = Math.floor(i / cellColumns) * cellSize, side = cellSize - gap, share = parseInt(used[i], 16) / 15;
    context.fillStyle = state[i] === "A" ? aside : state[i] === "L" ? leased : free;
    context.fillRect(x, y, side, side);
    context.fillStyle = full;
    context.fillRect(x, y + side * (1 - share), side, side * share);
  }
  const count = (letter) => [...state].filter((each) => each === letter).length, done = [...used].filter((digit) => digit === "f").length;
  const noun = per === 1 ? "slices" : `cells of ${per} slices`;
  const text = `${done} of ${used.length} ${noun} used, ${count("L")} leased, ${count("A")} set aside`;
  canvas.setAttribute("aria-label", text);
  if (!$("cell-text").dataset.cell) $("cell-text").textContent = text;
  $("coverage-legend").replaceChildren(...[["used", "used"], ["leased", "leased"], ["free", "not used yet"], ["aside", "set aside"]].map(([name, label]) => el("li", {}, el("i", { class: `c-${name}` }), label)));
}

function describeCell(i) {
  const { used, state, slices_per_cell: per } = view.coverage;
  if (!(i >= 0 && i < used.length)) return;
  const share = used[i] === "f" ? "all used" : used[i] === "0" ? "nothing used" : `about ${Math.round(100 * parseInt(used[i], 16) / 15)} % used`;
  const name = per === 1 ? `slice ${i}` : `slices ${i * per} to ${i * per + per - 1}`;
  $("cell-text").textContent = `${name}: ${share}${{ L: ", leased", A: ", set aside" }[state[i]] || ""}`;
  $("cell-text").dataset.cell = i;
}

function renderTable(name, rows, columns) {
  let section = $(`table-${name}`);
  if (!rows.length) { if (section) section.hidden = true; return; }
  const settings = tables[name] ??= { key: "", sign: 1, first: 0, filter: "" };
  const keys = Object.keys(columns).filter((key) => rows.some((row) => row[key] !== undefined && row[key] !== null));
  if (!section) {
    section = el("section", { id: `table-${name}`, "aria-labelledby": `title-${name}` }, el("h2", { id: `title-${name}` }, ""),
      el("div", { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": `title-${name}` }, el("table", {}, el("thead"), el("tbody"))), pager(name, settings));
    $("tables").append(section);
  }
  section.hidden = false;
  section.firstChild.textContent = `${TITLES[name]} (${rows.length.toLocaleString("en")})`;
  const head = section.querySelector("thead"), signature = `${keys}|${settings.key}|${settings.sign}`;
  if (head.dataset.signature !== signature) {
    const focused = head.contains(document.activeElement) ? document.activeElement.textContent : null;
    head.dataset.signature = signature;
    head.replaceChildren(el("tr", {}, ...keys.map((key) => {
      const button = el("button", { type: "button" }, heading(key));
      button.addEventListener("click", () => { settings.sign = settings.key === key ? -settings.sign : 1; settings.key = key; render(); });
      return el("th", { scope: "col", class: rows.some((row) => typeof row[key] === "string") ? "text" : "", "aria-sort": settings.key !== key ? "none" : settings.sign > 0 ? "ascending" : "descending" }, button);
    })));
    if (focused) [...head.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
  }
  const sorted = settings.key ? [...rows].sort((a, b) => settings.sign * (a[settings.key] > b[settings.key] ? 1 : a[settings.key] < b[settings.key] ? -1 : 0)) : rows;
  const matching = settings.filter ? sorted.filter((row) => keys.some((key) => String(row[key]).toLowerCase().includes(settings.filter))) : sorted;
  settings.first = Math.max(0, Math.min(settings.first, Math.floor((matching.length - 1) / PAGE_ROWS) * PAGE_ROWS));
  const shown = matching.slice(settings.first, settings.first + PAGE_ROWS);
  fillRows(section.querySelector("tbody"), shown, keys, columns);
  section.lastChild.hidden = rows.length <= PAGE_ROWS;
  section.querySelector("output").textContent = `${shown.length ? settings.first + 1 : 0} to ${settings.first + shown.length} of ${matching.length.toLocaleString("en")}`;
}

function heading(key) { return key.replace(/_bytes$/, "").replace("bytes_per_s", "rate").replace(/_s$/, "").replaceAll("_", " "); }

function pager(name, settings) {
  const turn = (label, rows) => {
    const button = el("button", { type: "button" }, label);
    button.addEventListener("click", () => { settings.first += rows; render(); });
    return button;
  };
  const filter = el("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${TITLES[name]}` });
  filter.addEventListener("input", () => { settings.filter = filter.value.toLowerCase(); settings.first = 0; render(); });
  return el("div", { class: "pager" }, turn("Previous", -PAGE_ROWS), el("output"), turn("Next", PAGE_ROWS), filter);
}

// A page of rows, whose cells are used again: a thousand rows, or new cells at each poll, take over 100 MB.
function fillRows(body, rows, keys, columns) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, i) => {
    const line = body.rows[i] ?? body.insertRow();
    while (line.cells.length > keys.length) line.deleteCell(-1);
    keys.forEach((key, k) => {
      const cell = line.cells[k] ?? line.insertCell(), text = format(row[key], columns[key]), isText = typeof row[key] === "string";
      if (!cell.firstChild) cell.append(text); else if (cell.firstChild.nodeValue !== text) cell.firstChild.nodeValue = text;
      if (cell.dataset.label !== heading(key)) cell.dataset.label = heading(key);
      const name = isText ? `text ${key === "state" ? tone(row[key]) : ""}` : "", title = isText ? row.error || text : "";
      if (cell.className !== name) cell.className = name;
      if (cell.title !== title) cell.title = title;
    });
  });
}

const opened = new Set(); // Titles of samples that the reader opened.

function renderSamples(samples) {
  const groups = new Map();
  for (const sample of samples) groups.set(sample.title, [...(groups.get(sample.title) || []), sample]);
  $("samples-list").replaceChildren(...[...groups].map(([title, group]) => {
    const details = el("details", opened.has(title) ? { open: "" } : {}, el("summary", {}, `${title} (${group.length})`),
      ...group.map((sample) => el("div", { class: "sample" }, sample.where || "", el("pre", {}, sample.text))));
    details.addEventListener("toggle", () => { if (details.open) opened.add(title); else opened.delete(title); });
    return details;
  }));
}

async function fetchJson(path) {
  const response = await fetch(path, { cache: "no-store" });
  const body = await response.json();
  if (!response.ok) throw new Error(body.message || response.statusText);
  return body;
}

async function refresh() {
  try {
    const isFirst = view === null;
    if (pinned === null) view = await fetchJson("v1/status");
    const last = points.at(-1);
    if (isFirst) ({ points, times } = await fetchJson("v1/history"));
    else if (pinned === null && (!last || last.at < view.at)) {
      const [rate, unit] = (view.figures || {}).throughput || [null, ""];
      points = [...points.slice(-899), { at: view.at, rate, unit, waits: view.waits || {} }];
      if (times.length) times.push(view.at);
    }
    if (show("replay", times.length > 1)) {
      $("moment").max = times.length - 1;
      if (pinned === null) $("moment").value = times.length - 1;
      $("moment-text").textContent = clock(pinned ?? times.at(-1));
    }
    if (pinned === null) render();
  } catch (error) {
    $("error").textContent = `The process that serves this page does not answer: ${error.message}`;
    show("error", true);
  }
}

async function showMoment(index) {
  const at = times[index];
  if (at === undefined) return;
  pinned = at;
  $("moment").value = index;
  $("moment-text").textContent = clock(at);
  try {
    const old = await fetchJson(`v1/views/${at}`);
    if (pinned === at) { view = old; render(); }
  } catch (error) { $("error").textContent = error.message; show("error", true); }
}

function stop() { clearInterval(player); player = null; $("play").textContent = "Play"; }

$("moment").addEventListener("input", () => { stop(); showMoment(Number($("moment").value)); });
$("live").addEventListener("click", () => { stop(); pinned = null; refresh(); });
$("play").addEventListener("click", () => {
  if (player !== null) return stop();
  $("play").textContent = "Pause";
  let index = Number($("moment").value) >= times.length - 1 ? 0 : Number($("moment").value);
  player = setInterval(() => { if (index >= times.length) stop(); else showMoment(index++); }, 500);
});

const THEMES = ["system", "light", "dark"];
function applyTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  try { localStorage.setItem("theme", theme); } catch { /* A private window. */ }
  if (view) render();
}
$("theme").addEventListener("click", () => applyTheme(THEMES[(THEMES.indexOf($("theme").textContent.slice(7)) + 1) % 3]));
try { const stored = localStorage.getItem("theme"); if (THEMES.includes(stored)) applyTheme(stored); } catch { /* None is stored. */ }

const cellAt = (event) => Math.floor(event.offsetY / cellSize) * cellColumns + Math.floor(event.offsetX / cellSize);
$("cells").addEventListener("mousemove", (event) => describeCell(cellAt(event)));
$("cells").addEventListener("mouseleave", () => { delete $("cell-text").dataset.cell; renderCoverage(); });
$("cells").addEventListener("blur", () => { delete $("cell-text").dataset.cell; renderCoverage(); });
$("cells").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: cellColumns, ArrowUp: -cellColumns }[event.key];
  if (!step) return;
  event.preventDefault();
  describeCell(Number($("cell-text").dataset.cell ?? -1) + step);
});
window.addEventListener("resize", () => { if (view) render(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
refresh();
setInterval(() => { if (!document.hidden) refresh(); }, POLL_MS);
