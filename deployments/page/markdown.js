// Converts Markdown to elements. All text is set as text; links and images stay text, so that nothing is fetched.
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*(?=\S)([^*\n]+?)\*|!?\[([^\]\n]*)\]\(([^)\s]+)[^)\n]*\)/s;
const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/, HEADING = /^ {0,3}(#{1,6})\s+(.*?)#*\s*$/, RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, QUOTE = /^ {0,3}> ?(.*)$/, ROW_LINE = /^\s*\|.*\|\s*$/, RULED = /^\s*\|[\s:|-]+\|\s*$/;

function inline(text) {
  const found = INLINE.exec(text);
  if (!found) return text ? [text] : [];
  const [whole, , code, strong, bold, soft, words, address] = found;
  const made = code !== undefined ? node("code", { textContent: code.trim() || code })
    : strong ?? bold ? node("strong", {}, ...inline(strong ?? bold))
    : soft !== undefined ? node("em", {}, ...inline(soft))
    : node("span", { className: "link", textContent: words && words !== address ? `${words} (${address})` : address });
  return [text.slice(0, found.index), made, ...inline(text.slice(found.index + whole.length))].filter((part) => part !== "");
}

function markdown(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n"), blocks = [];
  while (lines.length) {
    const line = lines[0];
    if (!line.trim()) lines.shift();
    else if (FENCE.test(line)) blocks.push(fenced(lines));
    else if (HEADING.test(line)) blocks.push(heading(lines.shift()));
    else if (RULE.test(line)) { lines.shift(); blocks.push(node("hr")); }
    else if (QUOTE.test(line)) blocks.push(node("blockquote", {}, ...markdown(taken(lines, (one) => QUOTE.test(one)).map((one) => QUOTE.exec(one)[1]).join("\n"))));
    else if (ITEM.test(line)) blocks.push(list(lines));
    else if (ROW_LINE.test(line) && RULED.test(lines[1] ?? "")) blocks.push(table(lines));
    else blocks.push(node("p", {}, ...inline([lines.shift(), ...taken(lines, isPlain)].join("\n"))));
  }
  for (const block of blocks) block.dir = "auto";
  return blocks;
}

const isPlain = (line) => line.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));

function taken(lines, belongs) {
  const end = lines.findIndex((line) => !belongs(line));
  return lines.splice(0, end < 0 ? lines.length : end);
}

const heading = (line) => {
  const [, marks, words] = HEADING.exec(line);
  // Levels 1 and 2 belong to the page's own headings.
  return node(`h${Math.min(marks.length + 2, 6)}`, {}, ...inline(words));
};

function fenced(lines) {
  const [, fence, language] = FENCE.exec(lines.shift());
  const inside = taken(lines, (line) => !line.trim().startsWith(fence));
  lines.shift();
  const block = node("pre", {}, node("code", { textContent: inside.join("\n") }));
  if (language) block.dataset.language = language;
  return block;
}

// Items of one list, with the indented lines below each item.
function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]), numbered = /\d/.test(mark);
  const made = node(numbered ? "ol" : "ul");
  if (numbered) made.start = parseInt(mark, 10);
  const deeper = (line) => line.length - line.trimStart().length > indent.length;
  for (;;) {
    while (lines.length > 1 && !lines[0].trim() && (deeper(lines[1]) || ITEM.test(lines[1]))) lines.shift();
    const item = ITEM.exec(lines[0] ?? "");
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== numbered) return made;
    lines.shift();
    const below = taken(lines, (line) => line.trim() && (deeper(line) || isPlain(line)));
    const least = Math.min(...below.filter(deeper).map((line) => line.length - line.trimStart().length), 99);
    const inner = markdown([item[3], ...below.map((line) => (deeper(line) ? line.slice(least) : line))].join("\n"));
    made.append(node("li", {}, ...inner.flatMap((part, index) => (index || part.tagName !== "P" ? [part] : [...part.childNodes]))));
  }
}

function table(lines) {
  const cells = (line, tag) => line.trim().slice(1, -1).split("|").map((cell) => node(tag, {}, ...inline(cell.trim())));
  const head = node("tr", {}, ...cells(lines.shift(), "th"));
  lines.shift();
  const rows = taken(lines, (line) => ROW_LINE.test(line)).map((line) => node("tr", {}, ...cells(line, "td")));
  return node("div", { className: "table" }, node("table", {}, node("thead", {}, head), node("tbody", {}, ...rows)));
}
