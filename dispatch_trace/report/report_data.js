"use strict";
// The rows as objects, the tree of modules over them, and the filters. Nothing here touches the document.

const DATA = JSON.parse(document.getElementById("data").textContent);
const TEXT = (number) => DATA.texts[number];
const num = (value) => value === "inf" ? Infinity : value === "-inf" ? -Infinity : value === "nan" ? NaN : value;
const FATAL_LABELS = new Set(["introduced", "parameter", "argument", "wiring", "nonfinite", "uninitialised", "structure"]);

const ROWS = (() => {
  const c = DATA.columns, length = (c.module || []).length, rows = new Array(length);
  for (let i = 0; i < length; i++) {
    const error = num(c.error[i]), band = num(c.band[i]);
    const over = error != null && (Number.isNaN(error) || (band != null ? error > band : error === Infinity));
    const row = { i, error, band, over, ref: c.ref[i], target: c.target[i], step: c.step[i], rank: c.rank[i], call: c.call[i],
      model: TEXT(c.model[i]), module: TEXT(c.module[i]), what: TEXT(c.what[i]), op: TEXT(c.op[i]), kind: TEXT(c.kind[i]),
      outcome: TEXT(c.outcome[i]), method: TEXT(c.method[i]), confidence: c.confidence[i], label: TEXT(c.label[i]),
      dtype: TEXT(c.dtypes[i][1] || c.dtypes[i][0]), shape: TEXT(c.shapes[i][1] || c.shapes[i][0]), quiet: c.quiet[i] === 1, down: [] };
    row.search = [row.module, row.what, row.op, row.label, row.outcome, TEXT(c.sources[i][1] || c.sources[i][0]), ...c.notes[i].map(TEXT)].join("\n").toLowerCase();
    rows[i] = row;
  }
  for (let i = 0; i < length; i++) for (const [slot, at] of c.up[i]) rows[at].down.push([slot, i]);
  return rows;
})();
const MANY_STEPS = new Set(ROWS.map((row) => row.step)).size > 1;
const MANY_RANKS = new Set(ROWS.map((row) => row.rank)).size > 1;

// Consecutive rows of one module stand in one group; a module's own return closes its group, so calls stay apart.
function buildTree(rows) {
  const root = { children: [], depth: -1, key: "", name: "" };
  let open = [root];
  for (const row of rows) {
    const parts = row.module ? row.module.split(".") : [];
    const path = [...(MANY_RANKS ? [`rank ${row.rank}`] : []), ...(MANY_STEPS ? [row.step < 0 ? "before the first step" : `step ${row.step}`] : []),
      ...(row.model ? [`model ${row.model}`] : []), ...parts];
    let depth = 0;
    while (depth < path.length && depth + 1 < open.length && open[depth + 1].name === path[depth]) depth++;
    open.length = depth + 1;
    for (; depth < path.length; depth++) {
      const inModule = depth - (path.length - parts.length);
      const group = { group: true, name: path[depth], title: path[depth], children: [], parent: open[depth],
        module: inModule < 0 ? null : parts.slice(0, inModule + 1).join("."), first: row.i };
      open[depth].children.push(group);
      open.push(group);
    }
    open[path.length].children.push(row);
    row.parent = open[path.length];
    if (row.kind === "module" && path.length) { open[path.length].own = row; open.length = path.length; }
  }
  const settle = (node, depth) => {
    node.depth = depth; node.size = 0; node.labels = {}; node.worst = null;
    for (let at = 0; at < node.children.length; at++) {
      let child = node.children[at];
      while (child.group && child.children.length === 1 && child.children[0].group) {  // a chain of lone groups is one
        const inner = child.children[0];
        inner.title = `${child.title}.${inner.title}`; inner.parent = node; child = node.children[at] = inner;
      }
      if (child.group) {
        settle(child, depth + 1);
        node.size += child.size;
        for (const [label, count] of Object.entries(child.labels)) node.labels[label] = (node.labels[label] || 0) + count;
        if (child.worst && excess(child.worst) > excess(node.worst)) node.worst = child.worst;
      } else {
        child.depth = depth + 1; node.size++;
        if (child.label) node.labels[child.label] = (node.labels[child.label] || 0) + 1;
        if (excess(child) > excess(node.worst)) node.worst = child;
      }
    }
  };
  settle(root, -1);
  return root;
}
const excess = (row) => !row || row.error == null ? -1 : row.band == null ? (row.error > 0 ? 1e-6 * row.error : 0) : row.error / Math.max(row.band, 1e-12);

// The lines to show: group heads and the rows of groups that are open.
function linesOf(root, folded) {
  const lines = [];
  const walk = (node) => {
    for (const child of node.children) {
      lines.push(child);
      if (child.group && !folded.has(child.first + ":" + child.depth)) walk(child);
    }
  };
  walk(root);
  return lines;
}

function matches(row, filter) {
  if (row.quiet && !filter.quiet && !filter.search && !["ref-only", "target-only"].includes(filter.show)) return false;
  if (filter.show === "introduced" && !FATAL_LABELS.has(row.label)) return false;
  if (filter.show === "over" && !row.over) return false;
  if (filter.show === "inherited" && row.label !== "inherited") return false;
  if (["ref-only", "target-only", "no-data"].includes(filter.show) && row.outcome !== filter.show) return false;
  if (filter.module && !(row.module === filter.module || row.module.startsWith(filter.module + "."))) return false;
  if (filter.op && row.op !== filter.op) return false;
  if (filter.dtype && row.dtype !== filter.dtype) return false;
  return !filter.search || filter.search.split(/\s+/).every((word) => row.search.includes(word));
}

function figure(value) {
  value = num(value);
  if (value == null) return "–";
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "inf");
  if (value === 0) return "0";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(4))) : value.toExponential(2).replace("e+", "e");
}
