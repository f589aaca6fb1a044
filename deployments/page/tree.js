// The picture of a round's draft tree.
const ROW = 25, GAP = 18, HIGH = 19, PAD = 12;
const pen = document.createElement("canvas").getContext("2d");

// Measured, because characters of some scripts are wider than others.
function widthOf(text) {
  return Math.ceil(pen.measureText(text).width) + PAD;
}

function treePicture({ tree, texts, depths, token_ids }) {
  pen.font = `11px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
  const count = tree.parents.length, kept = new Set([0, ...tree.accepted]);
  const children = tree.parents.map(() => []), depth = tree.parents.map(() => 0);
  tree.parents.forEach((parent, index) => { if (index) { children[parent].push(index); depth[index] = depth[parent] + 1; } });
  // The kept path comes first, so that it is a straight line on top.
  for (const mine of children) mine.sort((a, b) => kept.has(b) - kept.has(a) || a - b);
  const labels = tree.texts.map((text, index) => label(text, tree.token_ids[index]));
  const last = texts.length - 1, end = tree.accepted.at(-1) ?? 0, hasOwn = depths[last] === 0;
  const places = [...depth], wide = [];
  if (hasOwn) {
    // The model's own next token follows the path, in a column of the same tree.
    children[end].unshift(count);
    places.push(depth[end] + 1);
    labels.push(label(texts[last], token_ids[last]));
  }
  const widths = labels.map(widthOf);
  widths.forEach((width, index) => { wide[places[index]] = Math.max(wide[places[index]] ?? 0, width); });
  const left = wide.map((_, column) => wide.slice(0, column).reduce((sum, width) => sum + width + GAP, 0));
  const row = [];
  let rows = 0;
  (function place(index) {
    const mine = children[index] ?? [];
    row[index] = rows;
    mine.forEach((child, order) => { if (order) rows += 1; place(child); });
  })(0);
  const edges = [], nodes = [], middle = (index) => row[index] * ROW + HIGH / 2 + 1;
  labels.forEach((text, index) => {
    const isOwn = index === count, parent = isOwn ? end : tree.parents[index], taken = isOwn || kept.has(index);
    const x = left[places[index]] + 1, y = middle(index);
    if (index) {
      const from = left[places[parent]] + widths[parent] + 1, up = middle(parent), turn = from + (x - from) * .55;
      edges.push(shape("path", { d: `M${from} ${up}C${turn} ${up} ${turn} ${y} ${x} ${y}`, class: taken ? "taken" : "" }));
    }
    const kind = !index ? "root" : isOwn ? "taken bonus" : taken ? "taken" : "";
    const group = shape("g", { class: kind },
      shape("rect", { x, y: y - HIGH / 2, width: widths[index], height: HIGH, rx: 5 }),
      shape("text", { x: x + PAD / 2, y: y + 4 }));
    group.lastChild.textContent = text;
    const title = shape("title");
    title.textContent = isOwn ? "the model's own choice" : index ? `${JSON.stringify(tree.texts[index])}, ${taken ? "kept" : "not kept"}` : "the last token so far";
    group.append(title);
    if (!isOwn && index) group.dataset.depth = Math.min(depth[index], DEEPEST);
    nodes.push(group);
  });
  const width = left.at(-1) + wide.at(-1) + 2, height = (rows + 1) * ROW;
  edges.sort((a, b) => a.classList.contains("taken") - b.classList.contains("taken"));
  return shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": spoken(tree, texts) }, ...edges, ...nodes);
}

// A token that is part of a character has no text; its id is shown instead.
function label(text, id) {
  if (!text || text.includes("\ufffd")) return id === null ? "…" : `#${id}`;
  const visible = text.replace(/\n/g, "↵").replace(/ {3,}/g, (run) => `·${run.length}`).replace(/ /g, "·").replace(/\t/g, "⇥");
  const all = characters(visible);
  return all.length > 10 ? all.slice(0, 9).join("") + "…" : visible;
}

const spoken = (tree, texts) => `${tree.parents.length - 1} drafted tokens, ${tree.accepted.length} kept; the round brought ${JSON.stringify(texts.join(""))}`;
