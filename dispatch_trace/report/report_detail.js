// One pair beside the table: what was measured, what differs, how both tensors look, where to go from here.

function openPair(index) {
  const row = ROWS[index], host = $("detail"), c = DATA.columns, deep = DATA.details[index];
  state.opened = index;
  host.replaceChildren();
  const close = el("button", { type: "button", class: "close", "aria-label": "Close" }, "Close");
  close.addEventListener("click", closePair);
  const finding = DATA.findings.find((f) => f.row === index);
  const head = el("header", {}, el("div", { class: "top" }, el("h3", {}, row.what), close), el("p", { class: "path muted" }, row.module || "(root)"),
    el("p", { class: "lead" }, row.label ? chip(row.label) : null, el("span", { class: "chip" }, row.outcome), row.method ? el("span", { class: "chip" }, `${row.method}${row.confidence != null && row.confidence < 1 && row.confidence > 0 ? `, ${Math.round(100 * row.confidence)} %` : ""}`) : null));
  if (row.label) head.append(el("p", { class: "muted" }, DATA.labels[row.label] || ""));
  host.append(head);
  host.append(el("div", { class: "big" }, big("error", figure(row.error)), big("noise band", figure(row.band)), row.error > 0 && row.band > 0 ? big(row.over ? "the band" : "of the band", row.over ? `${figure(Number((row.error / row.band).toPrecision(2)))}×` : `${Math.max(1, Math.round(100 * row.error / row.band))} %`) : null));
  if (finding) host.append(section(finding.hint ? `Looks like: ${finding.hint}` : "Evidence", null, table(finding.evidence.map(([name, value]) => [name, value]))));
  host.append(section("Site", null, table([["", "reference", "target"],
    ["record", row.ref ?? (deep ? `(${deep.ref_seq})` : "–"), row.target ?? "–"], ["step", row.step, row.step], ["dtype", ...c.dtypes[index].map((t) => TEXT(t) || "–")], ["shape", ...c.shapes[index].map((t) => TEXT(t) || "–")],
    ["source", ...c.sources[index].map((t) => TEXT(t) || "–")], ...(TEXT(c.ref_module[index]) !== row.module ? [["module", TEXT(c.ref_module[index]), row.module]] : [])], { head: true, compare: ["dtype", "shape"] })));
  if (c.notes[index].length) host.append(section("Notes", null, el("p", { class: "muted" }, c.notes[index].map(TEXT).join("; "))));
  host.append(argumentsOf(c.args[index], row), statistics(c.stats[index]));
  if (deep) host.append(...tensorParts(deep));
  else host.append(section("Tensors", null, el("p", { class: "muted" }, whyNone(row, index))));
  host.append(links("Upstream", "what it read", c.up[index]), links("Downstream", "what reads it", row.down.slice(0, 24)));
  host.hidden = false; host.scrollTop = 0;
  draw();
}
function closePair() { $("detail").hidden = true; state.opened = -1; $("list").focus({ preventScroll: true }); draw(); }

const big = (name, value) => el("div", {}, el("b", {}, value), el("span", {}, name));
const section = (title, small, ...content) => el("section", {}, el("h4", {}, title, small ? el("small", {}, small) : null), ...content);

function table(rows, { head = false, compare = [], numbers = false } = {}) {
  const body = el("tbody"), node = el("table", {}, body);
  rows.forEach((cells, at) => {
    const differs = (compare === true || compare.includes(cells[0])) && at > 0 && String(cells[1]) !== String(cells[2]) && cells[1] !== "–" && cells[2] !== "–";
    body.append(el("tr", { class: differs ? "differs" : null }, cells.map((text, column) => el(head && at === 0 || column === 0 ? "th" : "td", { class: numbers && column ? "n" : null }, String(text)))));
  });
  return node;
}

function argumentsOf([ours, theirs], row) {
  const ref = new Map(ours.map(([name, text]) => [TEXT(name), TEXT(text)])), target = new Map(theirs.map(([name, text]) => [TEXT(name), TEXT(text)]));
  const names = [...new Set([...ref.keys(), ...target.keys()])];
  if (!names.length) return el("div", { hidden: "" });
  const both = row.ref != null && row.target != null;
  const differing = both ? names.filter((name) => ref.get(name) !== target.get(name)) : names, same = names.filter((name) => !differing.includes(name));
  const rows = (list) => [["", "reference", "target"], ...list.map((name) => [name, ref.get(name) ?? (both ? "not passed" : "–"), target.get(name) ?? (both ? "not passed" : "–")])];
  const parts = [];
  if (differing.length) parts.push(table(rows(differing), { head: true, compare: true }));
  if (same.length) parts.push(el("details", {}, el("summary", { class: "muted" }, `${same.length} equal`), table(rows(same), { head: true })));
  return section(both ? differing.length ? "Arguments that differ" : "Arguments agree" : "Arguments", null, ...parts);
}

function statistics([ours, theirs]) {
  const same = ours && !theirs; if (same) theirs = ours;
  if (!ours && !theirs) return section("Statistics", null, el("p", { class: "muted" }, "None were taken, or the traces are no longer where they were."));
  const rows = [["", "reference", "target", "difference"]];
  DATA.stats.forEach((name, at) => {
    const a = ours ? num(ours[at]) : null, b = theirs ? num(theirs[at]) : null;
    if (["nan", "posinf", "neginf"].includes(name) && !a && !b) return;
    rows.push([name.replace("_", " "), figure(a), figure(b), a == null || b == null ? "" : b - a === 0 ? "·" : figure(Number((b - a).toPrecision(3)))]);
  });
  return section("Statistics", same ? "equal" : null, table(rows, { head: true, numbers: true }));
}

function whyNone(row, index) {
  if (DATA.columns.stats[index].every((s) => s == null) && row.quiet) return "Light record: it only moves values, so none are kept.";
  if (row.ref == null || row.target == null) return "It has no partner to be compared with.";
  const lacks = DATA.kept.filter((k) => k && k !== "tensors");
  if (lacks.length) return `The traces keep no tensors here (save="${lacks[0]}"). Record with save="tensors" to see histograms, the error map and the worst elements.`;
  if (!DATA.kept[0] || !DATA.kept[1]) return "The traces were no longer there when this page was made.";
  return `Kept for findings, their surroundings and the worst of the others (at most ${DATA.max_details} pairs).`;
}

function tensorParts(deep) {
  const parts = [];
  const legend = el("small", {}, el("i", { class: "swatch ref" }), "reference", el("i", { class: "swatch target" }), "target");
  if (deep.histogram) { const node = section("Values", null, histogram(deep.histogram, ["h-ref", "h-target"])); node.firstChild.append(legend); parts.push(node); }
  if (!deep.map) { parts.push(section("Difference", null, el("p", { class: "muted" }, "The sizes differ, so elements do not correspond."))); return parts; }
  const share = deep.numel ? 100 * deep.equal / deep.numel : 100;
  if (deep.equal === deep.numel) { parts.push(section("Difference", null, el("p", { class: "muted" }, "Every element is equal."))); return parts; }
  if (deep.difference) parts.push(section("Difference", `target − reference; ${share.toFixed(share > 99 ? 2 : 0)} % of elements equal`, histogram(deep.difference, ["h-delta"])));
  parts.push(errorMap(deep));
  parts.push(section("Worst elements", null, table([["index", "reference", "target", "difference"], ...deep.worst.map(([at, a, b, d]) => [`[${at.join(", ")}]`, figure(a), figure(b), figure(d)])], { head: true, numbers: true })));
  return parts;
}

function histogram(data, classes) {
  const width = 420, height = 92, base = height - 16;
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `histogram from ${figure(data.low)} to ${figure(data.high)}, log counts` });
  const top = Math.log1p(Math.max(1, ...data.counts.flat())), bins = data.counts[0].length, step = width / bins;
  const y = (count) => base - (base - 4) * Math.log1p(count) / top;
  data.counts.forEach((counts, at) => {
    const outline = counts.map((count, i) => `${i ? "L" : "M"}${i * step} ${y(count)}H${(i + 1) * step}`).join("");
    chart.append(svg("path", { class: classes[at], d: classes[at] === "h-target" ? outline : `M0 ${base}${outline.replace("M", "L")}V${base}Z` }));
  });
  const low = num(data.low), high = num(data.high);
  if (low < 0 && high > 0) { const x = width * -low / (high - low); chart.append(svg("line", { class: "zero", x1: x, x2: x, y1: 2, y2: base })); if (x > 70 && x < width - 70) chart.append(svg("text", { x, y: height - 3, "text-anchor": "middle" }, "0")); }
  chart.append(svg("line", { class: "axis", x1: 0, x2: width, y1: base, y2: base }), svg("text", { x: 0, y: height - 3 }, figure(low)), svg("text", { x: width, y: height - 3, "text-anchor": "end" }, figure(high)));
  return chart;
}

function errorMap(deep) {
  const { cells, rows, columns, leading } = deep.map, style = getComputedStyle(document.documentElement);
  const canvas = el("canvas", { class: "map", width: cells[0].length, height: cells.length, role: "img", "aria-label": `largest error by block of ${rows} rows and ${columns} columns` });
  canvas.style.height = `${Math.max(28, Math.min(200, cells.length * 5))}px`;
  const context = canvas.getContext("2d");
  context.fillStyle = style.getPropertyValue("--panel"); context.fillRect(0, 0, canvas.width, canvas.height);
  cells.forEach((line, y) => [...line].forEach((letter, x) => {
    if (letter === ".") return;
    context.globalAlpha = letter === "!" ? 1 : ((letter.charCodeAt(0) - 96) / DATA.levels) ** 2;
    context.fillStyle = style.getPropertyValue(letter === "!" ? "--target" : "--over"); context.fillRect(x, y, 1, 1);
  }));
  const where = el("p", { class: "map-scale" }, el("span", {}, `faint: 1e-4 of the largest`), el("span", {}, `full: |Δ| = ${figure(deep.largest)}`));
  const tell = (event) => {
    const box = canvas.getBoundingClientRect(), x = Math.min(cells[0].length - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * cells[0].length))), y = Math.min(cells.length - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * cells.length)));
    const span = (at, blocks, total) => { const from = Math.floor(at * total / blocks), to = Math.floor((at + 1) * total / blocks) - 1; return from >= to ? `${from}` : `${from}–${to}`; };
    const letter = cells[y][x], level = letter === "." ? "equal" : letter === "!" ? "not finite" : `up to ${figure(deep.largest * 10 ** (4 * ((letter.charCodeAt(0) - 96) / DATA.levels - 1)))}`;
    where.replaceChildren(el("span", {}, `row ${span(y, cells.length, rows)}, column ${span(x, cells[0].length, columns)}`), el("span", {}, level));
  };
  canvas.addEventListener("pointermove", tell);
  const dims = leading.length > 1 ? `rows: dims [${leading.join(", ")}] in order; columns: last dim` : "rows and columns of the tensor";
  return section("Where the error lies", `${rows} × ${columns}, ${dims}`, canvas, where);
}

function links(title, small, list) {
  if (!list.length) return el("div", { hidden: "" });
  const items = list.map(([slot, at]) => {
    const row = ROWS[at], button = el("button", { type: "button", title: row.module || "(root)" }, el("span", { class: "slot" }, TEXT(slot)), el("span", { class: "what" }, row.kind === "param" ? `${row.module}.${row.what}` : row.what), el("span", { class: "err" }, `${row.over ? "◆ " : ""}${figure(row.error)}`));
    button.addEventListener("click", () => goTo(at));
    return el("li", {}, button);
  });
  return section(title, small, el("ul", { class: "links" }, items));
}

start();
