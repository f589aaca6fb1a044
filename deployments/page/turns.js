// Turns of the transcript: requests, streamed answers, comparison, copying, clearing.
let running = null; // AbortController of the running request
let messages = []; // the conversation so far
let drawing = false;
let showsTokens = false; // whether tokens are unfolded below the answers of a chat
const runOf = new WeakMap(); // runs by their text element

async function generate() {
  const prompt = $("prompt").value, chat = isChat(), compare = $("compare").checked;
  if (running || !prompt) return;
  if (!$("form").checkValidity()) { $("settings").open = true; $("form").reportValidity(); return; }
  if (!chat || !messages.length) clearTurns();
  const { path, body } = requestOf(prompt, messages), force = $("force").checked;
  const turn = beginTurn(prompt, chat, compare), runs = turn.runs;
  setRunning(new AbortController());
  if (chat) $("prompt").value = "";
  show(runs[0]);
  try {
    // Sequentially: concurrent runs would share the engine's rounds and distort each other's speed.
    for (const run of runs) {
      const speculation = { enabled: run.speculative, trace: true, ...(run.speculative && force ? { force } : {}) };
      const seed = runs[0].seed === null ? {} : { seed: runs[0].seed };
      const asked = { ...body, ...seed, stream: true, speculation };
      await stream(path, asked, running.signal, (chunk) => { run.take(chunk); draw(runs); });
    }
    if (compare) turn.element.append(verdict(...runs));
    tell([`Done: ${runs[0].numTokens} tokens`, runs[0].speed && `${number(runs[0].speed, 0)} per second`].filter(Boolean).join(", ") + `. ${runs[0].why}`);
  } catch (error) {
    if (error.name === "AbortError") tell("Stopped.");
    else fail(turn, error);
  } finally {
    if (chat && runs[0].content) messages.push({ role: "user", content: prompt }, { role: "assistant", content: runs[0].content });
    else if (chat) $("prompt").value ||= prompt;
    const seed = runs[0].seed === null ? {} : { seed: runs[0].seed };
    turn.element.append(tools(runs[0], { path, body: { ...body, ...seed } }));
    setRunning(null);
    keepForm();
    draw(runs);
  }
}

function beginTurn(prompt, chat, compare) {
  $("intro").hidden = true;
  const element = node("article", { className: "turn" });
  if (chat) element.append(node("p", { className: "asked said", dir: "auto", textContent: prompt }));
  const runs = (compare ? [true, false] : [true]).map((speculative) =>
    new Run(speculative, paneOf(speculative ? "Speculative" : "Plain", chat ? null : prompt), drafterOf($("adapter").value)));
  for (const run of runs) { run.pair = runs; runOf.set(run.output, run); }
  element.append(node("div", { className: compare ? "panes two" : "panes" }, ...runs.map((run) => run.pane)));
  if (narrow.matches) $("transcript").prepend(element);
  else $("transcript").append(element);
  element.scrollIntoView({ block: "nearest" });
  return { element, runs };
}

function paneOf(title, given) {
  const pane = node("section", { className: "pane" });
  const tokens = node("div", { className: "text", dir: "auto" });
  pane.append(node("h2", {}, node("span", { textContent: title }), node("output")));
  if (given === null) {
    const below = node("details", { className: "tokens", open: showsTokens }, node("summary", { textContent: "Tokens, and which were drafted" }), tokens);
    below.addEventListener("toggle", () => { showsTokens = below.open; });
    pane.append(node("div", { className: "prose" }), below);
    return pane;
  }
  if (given) tokens.append(node("span", { className: "given", textContent: given }));
  pane.append(tokens);
  return pane;
}

function fail({ element, runs }, error) {
  const words = error instanceof Problem ? error.message : `Error in this page: ${error.message}`;
  for (const run of runs) if (!run.rounds.length) run.pane.remove();
  const line = node("p", { className: "failure", textContent: words, role: "alert" });
  element.append(line);
  tell("");
  // After the frame that draws the rest, so that the buttons below are visible too.
  requestAnimationFrame(() => requestAnimationFrame(() => (element.lastChild ?? line).scrollIntoView({ block: "nearest" })));
}

function verdict(fast, slow) {
  const line = node("p", { className: "verdict", id: "verdict" });
  if (fast.text === slow.text) {
    line.append(node("b", { textContent: "Equal texts." }), ` All ${fast.numTokens} tokens are the same, one request after the other with one seed.`);
  } else {
    const [one, other] = [characters(fast.text), characters(slow.text)];
    const at = one.findIndex((character, index) => character !== other[index]);
    line.className = "verdict differs";
    line.append(node("b", { textContent: "The texts differ" }), ` from character ${(at < 0 ? one.length : at) + 1} on.`);
  }
  return line;
}

function tools(run, request) {
  const button = (name, text) => {
    const made = node("button", { type: "button", textContent: name });
    made.addEventListener("click", async () => {
      const done = await copied(text());
      tell(done ? "Copied." : "The browser does not allow this page to copy.");
      made.textContent = done ? "Copied" : "Not copied";
      setTimeout(() => { made.textContent = name; }, 1500);
    });
    return made;
  };
  const ofText = run.text ? [button("Copy text", () => run.text)] : [];
  return node("div", { className: "tools" }, ...ofText, button("Copy as curl", () => curlOf(request)));
}

// Pages loaded over plain HTTP from another machine have no clipboard API; they may copy a selection.
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = node("textarea", { className: "unseen", value: text, readOnly: true }), focus = document.activeElement;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focus?.focus();
  return done;
}

function setRunning(controller) {
  running = controller;
  const [next, last] = running ? [$("stop"), $("send")] : [$("send"), $("stop")];
  const hadFocus = document.activeElement === last;
  [next.hidden, last.hidden] = [false, true];
  if (hadFocus) next.focus();
  $("clear").hidden = Boolean(running) || !document.querySelector(".turn");
  // Screen readers read an answer once it is complete, not token by token.
  $("transcript").setAttribute("aria-busy", String(Boolean(running)));
  if (running) tell("Generating.");
}

// Redraws at most once per frame.
function draw(runs) {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const box = $("transcript"), below = box.scrollHeight - box.clientHeight - box.scrollTop;
    for (const run of runs) {
      const speed = run.speed, parts = [`${run.numTokens} tokens`, ...(speed ? [`${number(speed, 0)}/s`] : [])];
      run.drawProse();
      run.pane.querySelector("output").textContent = run.numTokens ? parts.join(" · ") : "";
    }
    if (below < 160) box.scrollTop = box.scrollHeight; // unless the user has scrolled up
    drawPanel();
  });
}

function clearTurns() {
  messages = [];
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
}

function clear() {
  clearTurns();
  show(null);
  $("intro").hidden = false;
  $("clear").hidden = true;
  $("prompt").focus();
}
