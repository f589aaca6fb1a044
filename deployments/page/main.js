// Event handlers for keys, input and resizing.
const TREE_INTRO = $("tree").textContent;
const narrow = matchMedia("(max-width: 1020px)"), touched = matchMedia("(pointer: coarse)");

// On a narrow screen the form comes first and the newest answer right below it, in visual and in tab order.
function arrange() {
  const focus = document.activeElement, turns = [...document.querySelectorAll(".turn")];
  if (narrow.matches) document.querySelector(".talk").prepend($("form"));
  else document.querySelector(".talk").append($("form"));
  if ($("transcript").dataset.newestFirst !== String(narrow.matches)) $("transcript").append(...turns.reverse());
  $("transcript").dataset.newestFirst = narrow.matches;
  focus?.focus();
}

function drawMode() {
  $("system-field").hidden = !isChat();
  $("form").dataset.chat = isChat();
  $("prompt").placeholder = isChat() ? "Write a message" : "Write a prompt";
  $("max_tokens").placeholder = isChat() ? "no limit" : COMPLETION_TOKENS;
  $("samples").replaceChildren(...(isChat() ? QUESTIONS : SAMPLES).map((sample) => {
    const button = node("button", { type: "button", textContent: sample.trim().split("\n")[0] });
    button.addEventListener("click", () => { $("prompt").value = sample; keepForm(); $("prompt").focus(); });
    return button;
  }));
  $("samples").dataset.chat = isChat();
}

function choose(event) {
  const span = event.target.closest("span[data-round]");
  const run = span && runOf.get(span.closest(".text"));
  if (run) show(run, Number(span.dataset.round));
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
$("form").addEventListener("input", (event) => { if (event.target.name === "mode") drawMode(); keepForm(); });
// Adapters may be loaded and unloaded while the page is open.
$("settings").addEventListener("toggle", () => { if ($("settings").open) drawModel(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("transcript").addEventListener("click", choose);
$("round").addEventListener("input", (event) => {
  const index = Number(event.target.value) - 1;
  chosen = running && index >= shown.rounds.length - 1 ? null : index;
  drawRound();
});
document.addEventListener("keydown", (event) => {
  if (event.isComposing) return; // Enter ends the composition of an input method
  if (event.key === "Escape" && running) { event.preventDefault(); running.abort(); }
  if (event.key !== "Enter") return;
  const always = event.ctrlKey || event.metaKey;
  // On-screen keyboards lack Shift+Enter: there Enter begins a new line, and the button sends.
  const plain = event.target === $("prompt") && !event.shiftKey && !event.altKey && !touched.matches;
  if (always || plain) { event.preventDefault(); generate(); }
});
$("key").addEventListener("change", () => { store("sessionStorage", KEY, $("key").value); drawModel(); });
narrow.addEventListener("change", arrange);
restoreForm();
$("settings").open = matchMedia("(min-width: 1021px)").matches;
arrange();
drawMode();
drawPanel();
if (!$("settings").open) drawModel(); // opening the settings draws it
drawLoad();
setInterval(drawLoad, 2000);
document.addEventListener("visibilitychange", drawLoad);
