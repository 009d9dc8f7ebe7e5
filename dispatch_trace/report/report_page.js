// The page: curve, virtual table, filters, keys. Text from a trace only ever becomes a text node.

const $ = (id) => document.getElementById(id);
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value != null && value !== false) node.setAttribute(name, value);
  for (const child of children.flat()) if (child != null) node.append(child);
  return node;
}
function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text != null) node.textContent = text;
  return node;
}
const LOG_LOW = -9, LOG_HIGH = 1;
const share = (value) => value > 0 ? Math.min(1, Math.max(0, (Math.log10(value) - LOG_LOW) / (LOG_HIGH - LOG_LOW))) : 0;

// --- the virtual table --------------------------------------------------------------------------

const state = { tree: null, lines: [], folded: new Set(), active: 0, opened: -1, filter: { show: "", module: "", op: "", dtype: "", search: "", quiet: false } };
const key = (group) => group.first + ":" + group.depth;
let lineHeight = 28;  // read once for each refresh: asking for a computed style costs a layout
const rowHeight = () => lineHeight;
let drawn = new Map();

function groupsOf(node, found = []) {
  for (const child of node.children) if (child.group) { found.push(child); groupsOf(child, found); }
  return found;
}

function applyFilter() {
  const f = state.filter, anchor = state.lines[state.active];
  const rows = ROWS.filter((row) => matches(row, f));
  state.tree = buildTree(rows);
  state.folded.clear();
  const narrowed = f.show || f.module || f.op || f.dtype || f.search;
  if (!narrowed || rows.length > 4000) foldAround(DATA.first == null ? null : DATA.findings[DATA.first].row);
  $("count").textContent = rows.length === ROWS.length ? `${rows.length} shown` : `${rows.length} of ${ROWS.length}`;
  $("empty").hidden = rows.length > 0;
  $("empty").textContent = ROWS.length ? "No pair matches these filters. Escape in the search field clears it." : "These traces share nothing that could be paired.";
  refresh(anchor);
}

// Everything folded but what leads to a row; without one, as many levels as fit a screen.
function foldAround(at) {
  const groups = groupsOf(state.tree);
  const row = at == null ? null : ROWS[at];
  if (row) {
    const path = new Set();
    for (let node = row.parent; node; node = node.parent) path.add(node);
    for (const group of groups) if (!path.has(group)) state.folded.add(key(group));
    return;
  }
  for (let depth = 0; depth < 12; depth++) {
    state.folded = new Set(groups.filter((group) => group.depth > depth).map(key));
    if (linesOf(state.tree, new Set(groups.filter((g) => g.depth > depth + 1).map(key))).length > 60) break;
  }
  if (linesOf(state.tree, state.folded).length > 400) state.folded = new Set(groups.map(key));
}

function refresh(anchor) {
  lineHeight = parseInt(getComputedStyle(document.documentElement).getPropertyValue("--row"), 10) || 28;
  state.lines = linesOf(state.tree, state.folded);
  state.active = Math.max(0, anchor ? state.lines.findIndex((line) => line === anchor || (line.group && anchor.group && key(line) === key(anchor))) : 0);
  $("list").style.height = `${state.lines.length * rowHeight()}px`;
  for (const node of drawn.values()) node.remove();
  drawn = new Map();
  draw();
}

function draw() {
  const height = rowHeight(), top = -$("list").getBoundingClientRect().top;
  const from = Math.max(0, Math.floor(top / height) - 12), to = Math.min(state.lines.length, Math.ceil((top + window.innerHeight) / height) + 12);
  for (const [at, node] of drawn) if (at < from || at >= to) { node.remove(); drawn.delete(at); }
  const fresh = document.createDocumentFragment();
  for (let at = from; at < to; at++) if (!drawn.has(at)) { const node = lineNode(at); drawn.set(at, node); fresh.append(node); }
  $("list").append(fresh);
}

function lineNode(at) {
  const line = state.lines[at], row = line.group ? line.own || line.worst : line;
  const classes = ["line"];
  if (line.group) classes.push("group");
  if (line.quiet) classes.push("quiet");
  if (row && row.over) classes.push("over");
  if (!line.group && FATAL_LABELS.has(line.label)) classes.push("found");
  if (at === state.active) classes.push("active");
  const folded = line.group && state.folded.has(key(line));
  const node = el("div", { class: classes.join(" "), role: "row", id: `line-${at}`, "data-at": at, "aria-level": line.depth + 1,
    "aria-expanded": line.group ? String(!folded) : null, "aria-selected": at === state.active ? "true" : null });
  node.style.transform = `translateY(${at * rowHeight()}px)`;
  const name = el("span", { class: "c-name", role: "gridcell" });
  name.style.paddingLeft = `${Math.min(line.depth, 12) * 16}px`;
  if (line.group) {
    name.append(el("span", { class: "twist", "aria-hidden": "true" }, folded ? "▸" : "▾"), line.title);
    if (line.module !== null && DATA.classes[line.module]) name.append(el("span", { class: "class" }, DATA.classes[line.module]));
    name.append(el("span", { class: "tally" }, `${line.size}`));
    name.title = line.module || line.title;
  } else {
    name.append(el("span", { class: "twist" }), el("span", { class: "op" }, line.what), el("span", { class: "seq" }, line.target != null ? `${line.target}` : `(${line.ref})`));
    name.title = `${line.module || "(root)"}  ${line.what}`;
  }
  const label = el("span", { class: "c-label", role: "gridcell" });
  if (line.group) { const worst = Object.keys(line.labels).sort((a, b) => FATAL_LABELS.has(b) - FATAL_LABELS.has(a))[0]; if (worst && folded) label.append(chip(worst, line.labels[worst])); }
  else if (line.label) label.append(chip(line.label));
  else if (line.outcome.endsWith("-only")) label.append(el("span", { class: "chip only" }, line.outcome));
  node.append(name, label, el("span", { class: "c-gauge", role: "gridcell" }, row && row.error != null ? gauge(row) : null),
    cell("c-error", row ? figure(row.error) : ""), cell("c-band", row ? figure(row.band) : ""),
    cell("c-method", line.group ? "" : line.method || line.outcome), cell("c-dtype", line.group ? "" : line.dtype), cell("c-shape", line.group ? "" : line.shape));
  return node;
}
const cell = (name, text) => el("span", { class: name, role: "gridcell", title: text }, text === "–" ? "" : text);
const chip = (label, count) => el("span", { class: `chip label-${label}` }, count > 1 ? `${label} ${count}` : label);
function gauge(row) {
  const node = el("span", { class: "gauge", "aria-hidden": "true" });
  if (row.band != null) { const zone = el("span", { class: "zone" }); zone.style.width = `${100 * share(row.band)}%`; node.append(zone); }
  const mark = el("span", { class: "at" }); mark.style.left = `${100 * (Number.isFinite(row.error) ? share(row.error) : 1)}%`;
  node.append(mark);
  return node;
}

function activate(at, { scroll = true } = {}) {
  if (!state.lines.length) return;
  const before = drawn.get(state.active);
  if (before) { before.classList.remove("active"); before.removeAttribute("aria-selected"); }
  state.active = Math.max(0, Math.min(state.lines.length - 1, at));
  if (scroll) {
    const height = rowHeight(), y = $("list").getBoundingClientRect().top + state.active * height;
    const low = document.querySelector(".head").getBoundingClientRect().bottom, high = window.innerHeight - 8;
    const ceiling = Math.max(low, 100);
    if (y < ceiling) window.scrollBy(0, y - ceiling); else if (y + height > high) window.scrollBy(0, y + height - high);
    draw();
  }
  const node = drawn.get(state.active);
  if (node) { node.classList.add("active"); node.setAttribute("aria-selected", "true"); }
  $("list").setAttribute("aria-activedescendant", `line-${state.active}`);
}

function toggle(group, fold) {
  const id = key(group);
  if (fold === undefined) fold = !state.folded.has(id);
  if (fold) state.folded.add(id); else state.folded.delete(id);
  refresh(group);
}

// Shows a row wherever it is: filters that hide it are dropped, groups around it unfold.
function goTo(index, { open = true } = {}) {
  const row = ROWS[index];
  if (!matches(row, state.filter)) { resetFilters(row.quiet); applyFilter(); }
  for (let node = row.parent; node && node.group; node = node.parent) state.folded.delete(key(node));
  refresh();
  const at = state.lines.indexOf(row);
  if (open) openPair(index);
  const y = $("list").getBoundingClientRect().top + window.scrollY + at * rowHeight();
  if (y < window.scrollY + 140 || y > window.scrollY + window.innerHeight - 60) window.scrollTo(0, y - window.innerHeight * 0.35);
  activate(at);
  $("list").focus({ preventScroll: true });
}

function resetFilters(quiet) {
  state.filter = { show: "", module: "", op: "", dtype: "", search: "", quiet: quiet || state.filter.quiet };
  for (const id of ["search", "show-filter", "module-filter", "op-filter", "dtype-filter"]) $(id).value = "";
  $("quiet-filter").checked = state.filter.quiet;
}

// --- the curve ----------------------------------------------------------------------------------

function drawCurve() {
  const host = $("curve"), points = ROWS.filter((row) => row.error != null && !row.quiet);
  host.replaceChildren();
  if (!points.length) { host.append(el("p", { class: "none" }, "No values were compared, so there is no error to draw.")); return; }
  host.setAttribute("aria-label", `Relative error of ${points.length} values in execution order, log scale; ${points.filter((p) => p.over).length} beyond the noise band`);
  const width = host.clientWidth, height = host.clientHeight, left = 46, right = 12, top = 14, bottom = 26;
  const finite = points.flatMap((p) => [p.error, p.band]).filter((v) => v > 0 && Number.isFinite(v));
  let low = Math.floor(Math.log10(Math.max(1e-12, Math.min(...finiteMin(finite))))), high = Math.ceil(Math.log10(Math.max(...finiteMax(finite))));
  if (high - low < 2) { low -= 1; high += 1; }
  const x = (i) => left + (width - left - right) * (points.length === 1 ? 0.5 : i / (points.length - 1));
  const y = (v) => { const at = v > 0 ? Number.isFinite(v) ? Math.log10(v) : high : low; return top + (height - top - bottom) * (1 - (Math.max(low, Math.min(high, at)) - low) / (high - low)); };
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" });
  const stride = Math.max(1, Math.ceil((high - low) / 5));
  for (let power = low; power <= high; power += stride) {
    chart.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power) }));
    chart.append(svg("text", { x: left - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, power === low && points.some((p) => p.error === 0) ? "exact" : `1e${power}`));
  }
  // One column of pixels shows its extremes: what stands out is never thinned away.
  const columns = new Map();
  points.forEach((p, i) => { const c = Math.round(x(i)), seen = columns.get(c) || { c, worst: p, band: 0, least: Infinity, i }; if (excess(p) > excess(seen.worst)) { seen.worst = p; seen.i = i; }
    if (p.band != null) { seen.band = Math.max(seen.band, p.band); } columns.set(c, seen); });
  const list = [...columns.values()];
  let last = 0; for (const column of list) { if (column.band > 0) last = column.band; column.shown = column.band > 0 ? column.band : last; }
  const base = y(0);
  const half = list.length > 1 ? (width - left - right) / (list.length - 1) / 2 : 20;
  chart.append(svg("path", { class: "bandarea", d: list.map((s) => `M${s.c - half} ${base}V${y(s.shown)}H${s.c + half}V${base}Z`).join("") }));
  chart.append(svg("path", { class: "trail", d: list.map((s, n) => `${n ? "L" : "M"}${s.c} ${y(s.worst.error)}`).join("") }));
  for (const s of list) if (!s.worst.over) chart.append(svg("circle", { class: "pt", cx: s.c, cy: y(s.worst.error), r: width / list.length < 5 ? 1.3 : 2.2 }));
  for (const s of list) if (s.worst.over) chart.append(svg("path", { class: "pt-over", d: `M${s.c} ${y(s.worst.error) - 4}l4 4l-4 4l-4 -4Z` }));
  chart.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: base, y2: base }));
  depthTicks(points, x, width, height, chart);
  const first = DATA.first == null ? null : DATA.findings[DATA.first];
  if (first && first.row != null) {
    let i = points.findIndex((p) => p.i >= first.row); if (i < 0) i = points.length - 1;
    const at = x(i), flip = at > width * 0.7;
    chart.append(svg("line", { class: "mark", id: "curve-mark", x1: at, x2: at, y1: 2, y2: base }));
    chart.append(svg("text", { class: "mark-text", x: at + (flip ? -7 : 7), y: 11, "text-anchor": flip ? "end" : "start" }, `${first.label}: ${first.op || "return"}`));
  }
  host.append(chart);
  const tip = el("div", { class: "tip", hidden: "" }), line = svg("line", { class: "cursor", y1: top, y2: base, visibility: "hidden" });
  chart.append(line); host.append(tip);
  const nearest = (event) => { const box = chart.getBoundingClientRect(), at = event.clientX - box.left; let best = list[0]; for (const s of list) if (Math.abs(s.c - at) < Math.abs(best.c - at)) best = s; return best; };
  chart.addEventListener("pointermove", (event) => {
    const s = nearest(event), p = s.worst;
    line.setAttribute("x1", s.c); line.setAttribute("x2", s.c); line.setAttribute("visibility", "visible");
    tip.replaceChildren(el("b", {}, p.what), ` ${p.module || "(root)"}`, el("br"), `error ${figure(p.error)}, band ${figure(p.band)}`);
    tip.hidden = false;
    if (s.c > width / 2) { tip.style.right = `${width - s.c + 10}px`; tip.style.left = ""; } else { tip.style.left = `${s.c + 10}px`; tip.style.right = ""; }
  });
  chart.addEventListener("pointerleave", () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); });
  chart.addEventListener("click", (event) => goTo(nearest(event).worst.i));
}
const finiteMin = (values) => [values.reduce((a, b) => Math.min(a, b), 1)];
const finiteMax = (values) => [values.reduce((a, b) => Math.max(a, b), values[0] || 1)];

// Names of modules under the axis: the deepest level whose runs still have room.
function depthTicks(points, x, width, height, chart) {
  let best = [];
  for (let depth = 1; depth < 8; depth++) {
    const runs = [];
    points.forEach((p, i) => { const name = p.module.split(".").slice(0, depth).join("."); const run = runs[runs.length - 1]; if (!run || run.name !== name) runs.push({ name, from: i, to: i }); else run.to = i; });
    const labelled = runs.filter((run) => run.name && x(run.to) - x(run.from) > tickText(run).length * 6 + 6);
    if (labelled.length > Math.max(1, best.length * 1.5) || depth === 1) best = labelled;
  }
  for (const run of best) {
    const from = x(run.from);
    chart.append(svg("line", { class: "axis", x1: from, x2: from, y1: height - 26, y2: height - 20 }));
    chart.append(svg("text", { x: from + 4, y: height - 8 }, tickText(run)));
  }
}
const tickText = (run) => run.name.split(".").slice(-2).join(".");

// --- wiring -------------------------------------------------------------------------------------

function fillFilters() {
  const paths = new Set();
  for (const row of ROWS) { const parts = row.module.split("."); for (let n = 1; n <= parts.length; n++) paths.add(parts.slice(0, n).join(".")); }
  for (const path of paths) if (path) $("modules").append(el("option", { value: path }));
  for (const [id, name] of [["op-filter", "op"], ["dtype-filter", "dtype"]]) {
    for (const value of [...new Set(ROWS.map((row) => row[name]))].filter(Boolean).sort()) $(id).append(el("option", { value }, value));
  }
  const set = (name, value) => { state.filter[name] = value; applyFilter(); };
  let wait = 0;
  $("search").addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(() => set("search", $("search").value.trim().toLowerCase()), 60); });
  $("show-filter").addEventListener("change", () => set("show", $("show-filter").value));
  $("module-filter").addEventListener("input", () => set("module", $("module-filter").value.trim()));
  $("op-filter").addEventListener("change", () => set("op", $("op-filter").value));
  $("dtype-filter").addEventListener("change", () => set("dtype", $("dtype-filter").value));
  $("quiet-filter").addEventListener("change", () => set("quiet", $("quiet-filter").checked));
  $("expand").addEventListener("click", () => { state.folded.clear(); refresh(state.lines[state.active]); });
  $("collapse").addEventListener("click", () => { state.folded = new Set(groupsOf(state.tree).map(key)); refresh(); });
}

function stepFinding(by) {
  const rows = [...new Set(DATA.findings.map((f) => f.row).filter((row) => row != null))].sort((a, b) => a - b);
  if (!rows.length) return;
  const at = rows.indexOf(state.opened);
  goTo(rows[(at < 0 ? 0 : at + by + rows.length) % rows.length]);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const typing = event.target.closest("input:not([type=checkbox]), select");
  if (event.key === "Escape") {
    if (event.target === $("search") && $("search").value) { $("search").value = ""; state.filter.search = ""; applyFilter(); }
    else if (!$("detail").hidden) closePair();
    else if (typing) $("list").focus();
    event.preventDefault();
    return;
  }
  if (typing) { if (event.key === "Enter" && event.target === $("search")) $("list").focus(); return; }
  if (event.target.closest("button, summary, a") && event.key === "Enter") return;
  const line = state.lines[state.active], page = Math.max(1, Math.floor(window.innerHeight / rowHeight()) - 6);
  const act = {
    ArrowDown: () => activate(state.active + 1), ArrowUp: () => activate(state.active - 1), PageDown: () => activate(state.active + page), PageUp: () => activate(state.active - page),
    Home: () => activate(0), End: () => activate(state.lines.length - 1),
    ArrowRight: () => line && (line.group && state.folded.has(key(line)) ? toggle(line, false) : line.group && activate(state.active + 1)),
    ArrowLeft: () => line && (line.group && !state.folded.has(key(line)) ? toggle(line, true) : line.parent.group && activate(state.lines.indexOf(line.parent))),
    Enter: () => line && (line.group ? toggle(line) : openPair(line.i)),
    "/": () => { $("search").focus(); $("search").select(); }, "?": () => $("help").showModal(), n: () => stepFinding(1), p: () => stepFinding(-1),
  }[event.key];
  if (act && !($("detail").contains(event.target) && event.key !== "/" && event.key !== "n" && event.key !== "p" && event.key !== "?")) { event.preventDefault(); act(); }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  try { localStorage.setItem("dispatch-trace-theme", theme); } catch { /* a page from disk may have no storage */ }
  if (state.opened >= 0 && !$("detail").hidden) openPair(state.opened);
}

// On paper a table has no window: all lines that the filters leave, up to a few pages.
const MAX_PRINTED = 600;
function beforePrint() {
  for (const node of drawn.values()) node.remove();
  drawn = new Map();
  const count = Math.min(state.lines.length, MAX_PRINTED);
  for (let at = 0; at < count; at++) { const node = lineNode(at); drawn.set(at, node); $("list").append(node); }
  $("print-note").textContent = state.lines.length > count ? `${state.lines.length - count} more lines are not printed: filter before printing.` : "";
}

function start() {
  let theme = "auto";
  try { theme = localStorage.getItem("dispatch-trace-theme") || "auto"; } catch { /* as above */ }
  fillFilters();
  setTheme(["auto", "light", "dark"].includes(theme) ? theme : "auto");
  $("theme").addEventListener("click", () => setTheme({ auto: "light", light: "dark", dark: "auto" }[document.documentElement.dataset.theme]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!$("detail").hidden) openPair(state.opened); });
  $("help-button").addEventListener("click", () => $("help").showModal());
  const measure = () => document.documentElement.style.setProperty("--tools", `${getComputedStyle($("tools")).position === "sticky" ? $("tools").offsetHeight : 0}px`);
  new ResizeObserver(measure).observe($("tools"));
  drawCurve();
  applyFilter();
  addEventListener("scroll", draw, { passive: true });
  let wait = 0;
  addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(() => { measure(); drawCurve(); draw(); }, 80); });
  addEventListener("beforeprint", beforePrint);
  addEventListener("afterprint", () => refresh(state.lines[state.active]));
  document.addEventListener("keydown", onKey);
  $("list").addEventListener("click", (event) => {
    const node = event.target.closest(".line");
    if (!node) return;
    const at = Number(node.dataset.at), line = state.lines[at];
    $("list").focus({ preventScroll: true });
    activate(at, { scroll: false });
    if (line.group) toggle(line); else openPair(line.i);
  });
  if ($("open-first")) $("open-first").addEventListener("click", () => goTo(Number($("first-finding").dataset.row)));
  if ($("all-findings")) $("all-findings").addEventListener("click", () => { resetFilters(); state.filter.show = $("show-filter").value = "introduced"; applyFilter(); $("rows").scrollIntoView(); });
  for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", async () => {
    const text = $(button.dataset.copy).textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
    catch { const range = document.createRange(); range.selectNodeContents($(button.dataset.copy)); getSelection().removeAllRanges(); getSelection().addRange(range); button.textContent = "Selected"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  document.documentElement.dataset.ready = "yes";
}
