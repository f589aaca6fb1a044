// Tokens per round over time while the page is open, with marks where another version of the draft head took over.
const MOST_POINTS = 240, HEADS_S = 5, HEIGHT = 60;
const headPoints = []; // { at, length }: time, and tokens per round since the previous point
let headTotals = null, headsTimer = null;

// Called only for servers that report the path of their head versions.
function followHeads(path) {
  if (headsTimer !== null) return;
  headsTimer = setInterval(() => drawHeads(path), 1000 * HEADS_S);
  drawHeads(path);
}

async function drawHeads(path) {
  if (document.visibilityState === "hidden") return;
  const { body } = await ask(path);
  if (!body?.versions) return;
  takeHeads(body);
  $("heads").hidden = false;
  $("head-version").textContent = `version ${body.served}`;
  $("head-picture").replaceChildren(headPicture(body.decisions));
}

function takeHeads({ versions }) {
  const sum = (name) => versions.reduce((total, { acceptance }) => total + (acceptance?.[name] ?? 0), 0);
  const totals = { rounds: sum("rounds"), accepted: sum("accepted") };
  const rounds = totals.rounds - (headTotals?.rounds ?? totals.rounds);
  const accepted = totals.accepted - (headTotals?.accepted ?? totals.accepted);
  // A restarted engine counts from 0.
  if (rounds > 0 && accepted >= 0) headPoints.push({ at: Date.now() / 1000, length: 1 + accepted / rounds });
  if (headPoints.length > MOST_POINTS) headPoints.shift();
  headTotals = totals;
}

function headPicture(decisions) {
  if (headPoints.length < 2) return node("p", { textContent: "Tokens per round are drawn here while requests run." });
  const first = headPoints[0].at, span = headPoints.at(-1).at - first;
  const most = Math.max(...headPoints.map(({ length }) => length));
  const x = (at) => (100 * (at - first)) / span, y = (length) => HEIGHT * (1 - (length - 1) / Math.max(most - 1, 0.1));
  const line = headPoints.map(({ at, length }) => `${x(at)},${y(length)}`).join(" ");
  const swaps = decisions.filter(({ at, what }) => what !== "rejected" && at >= first && at <= first + span);
  const marks = swaps.map(({ at, what, served }) => {
    const mark = shape("line", { x1: x(at), x2: x(at), y1: 0, y2: HEIGHT, class: "swap" });
    mark.append(shape("title", {}, `${what.replace("_", " ")}: version ${served}`));
    return mark;
  });
  const label = `${number(headPoints.at(-1).length, 2)} tokens per round now, ${swaps.length} swap${swaps.length === 1 ? "" : "s"}`;
  const picture = { viewBox: `0 0 100 ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  return shape("svg", picture, shape("polyline", { points: line }), ...marks);
}
