// The panel beside the answers, which shows one run, or placeholders without a run.
let shown = null; // the run
let chosen = null; // index of the selected round; null follows the stream

function drawPanel() {
  drawFigures();
  drawRound();
  drawDepths();
}

function show(run, index = null) {
  [shown, chosen] = [run, index];
  drawPanel();
}

function drawFigures() {
  const [fast, slow] = shown?.pair ?? [];
  const drafts = fast?.drafts ?? [], accepted = drafts.reduce((sum, { tree }) => sum + tree.accepted.length, 0);
  $("length").textContent = drafts.length ? number(1 + accepted / drafts.length, 2) : "–";
  $("speed").textContent = fast?.speed ? number(fast.speed, 0) : "–";
  const speeds = fast?.isDrafted && fast.speed && slow?.speed ? [fast.speed, slow.speed] : null;
  $("ratio-label").textContent = speeds ? "times plain speed" : "rounds";
  $("ratio").textContent = speeds ? number(speeds[0] / speeds[1], 2) : fast?.rounds.length || "–";
  $("speeds").hidden = !speeds;
  [["fast", 0], ["slow", 1]].forEach(([id, index]) => {
    $(id).textContent = speeds ? `${number(speeds[index], 0)}/s` : "";
    const share = speeds ? (100 * speeds[index]) / Math.max(...speeds) : 0;
    document.querySelector(`.speeds .${id} rect`).setAttribute("width", `${share}%`);
  });
  const why = fast?.why ?? "", notes = why ? [why] : [];
  if (!why && drafts.length && fast.drafter) notes.push(`${fast.drafter} drafted ${drafts.length} of ${fast.rounds.length} rounds.`);
  if (speeds) notes.push("The speeds are of a single run each: other work on the machine affects them.");
  if (why && slow?.speed) notes.push("Both sides decoded plainly, or nearly so: their speeds are not compared.");
  if (why && fast.plain.some((round) => round.plain_reason === "plain")) notes.push("“Always draft” drafts all the same.");
  $("notes").textContent = notes.join(" ");
  $("notes").hidden = !notes.length;
}

function drawRound() {
  const count = shown?.rounds.length ?? 0, slider = $("round");
  slider.disabled = !count;
  slider.max = Math.max(count, 1);
  for (const span of document.querySelectorAll(".text span.shown")) span.classList.remove("shown");
  if (!count) {
    const text = running ? "The first round is on its way." : shown ? "No round came." : TREE_INTRO;
    $("caption").textContent = "";
    slider.value = 1;
    slider.removeAttribute("aria-valuetext");
    $("tree").replaceChildren(node("p", { textContent: text }));
    return;
  }
  // Without a selection, show the latest round with a tree, or else with a reason; an answer's first and last rounds have no tree.
  const latest = (tells) => { const index = shown.rounds.findLastIndex(tells); return index < 0 ? null : index; };
  const telling = () => latest((round) => round.tree) ?? latest((round) => !["prompt", "idle"].includes(round.plain_reason));
  const index = chosen ?? telling() ?? count - 1, round = shown.rounds[index], tree = round.tree;
  slider.value = index + 1;
  if (chosen !== null) for (const span of shown.spans[index]) span.classList.add("shown");
  const drafted = tree ? `${tree.accepted.length} of ${tree.parents.length - 1} drafted kept` : "no draft";
  $("caption").textContent = `Round ${index + 1} of ${count} · ${drafted}`;
  slider.setAttribute("aria-valuetext", $("caption").textContent);
  $("tree").replaceChildren(tree ? treePicture(round) : node("p", { textContent: plainText(round) }));
}

function plainText(round) {
  if (round.plain_reason === "prompt") return "This token comes with the prompt; drafts begin after it.";
  return `No draft in this round: ${reasonOf(round, shown.drafter)}. The model wrote one token by itself.`;
}

function drawDepths() {
  const drafts = shown?.drafts ?? [];
  const deepest = drafts.reduce((most, { tree }) => Math.max(most, tree.accepted.length), 0);
  const counts = Array.from({ length: Math.max(deepest, 3) }, (_, index) => drafts.filter(({ tree }) => tree.accepted.length > index).length);
  const rows = counts.flatMap((count, index) => {
    const share = drafts.length ? count / drafts.length : 0;
    const key = node("span", { className: "key" }, node("i"), String(index + 1));
    const bar = shape("svg", { "aria-hidden": "true" }, shape("rect", { height: 9, width: `${100 * share}%` }));
    for (const part of [key, bar]) part.dataset.depth = Math.min(index + 1, DEEPEST);
    return [key, bar, node("output", { textContent: drafts.length ? `${number(100 * share, 0)} %` : "" })];
  });
  $("depths").replaceChildren(...rows);
}
