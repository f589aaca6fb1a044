// Request settings of the form, their storage for the next visit, and the list of models.
const CHATS = "chat" in document.body.dataset; // the model has a chat template
const QUESTIONS = ["Explain in three sentences how birds stay in the air.", "Write a Python function that reverses a list, and explain it.", "List five ideas for a rainy day."];
const COMPLETION_TOKENS = 256; // limit of a completion, which may never end by itself; a chat's answer does
const SAMPLES = ["def read_lines(path):\n    ", "class Stack:\n    def __init__(self):\n        ", "Once upon a time"];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const TEXTS = ["prompt", "system", ...NUMBERS], SWITCHES = ["compare", "force"];
const KEPT = "wingbeat.form", KEY = "wingbeat.key";

const isChat = () => document.querySelector("[name=mode]:checked").value === "chat";

// A request without its speculation field; `before` holds the messages so far.
function requestOf(prompt, before) {
  const body = $("adapter").value ? { model: $("adapter").value } : {};
  if (isChat()) {
    const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
    body.messages = [...system, ...before, { role: "user", content: prompt }];
  } else {
    body.prompt = prompt;
  }
  if (!isChat()) body.max_tokens = COMPLETION_TOKENS;
  for (const id of NUMBERS) if ($(id).value !== "") body[id] = Number($(id).value);
  return { path: isChat() ? "/v1/chat/completions" : "/v1/completions", body };
}

// Shell command that generates the same text. The key is referenced by a variable, not copied.
function curlOf({ path, body }) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = $("key").value ? ` \\\n  -H "Authorization: Bearer $WINGBEAT_API_KEY"` : "";
  return `curl -s ${quoted(location.origin + BASE + path)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body, null, 2))}`;
}

// A browser may refuse storage; then nothing is stored.
function stored(storage, name) {
  try { return window[storage].getItem(name); } catch { return null; }
}

function store(storage, name, text) {
  try { window[storage].setItem(name, text); } catch { /* refused, for example in private windows */ }
}

function keepForm() {
  const fields = Object.fromEntries(TEXTS.map((id) => [id, $(id).value]));
  for (const id of SWITCHES) fields[id] = $(id).checked;
  store("localStorage", KEPT, JSON.stringify({ ...fields, isChat: isChat() }));
}

function restoreForm() {
  let fields = null;
  try { fields = JSON.parse(stored("localStorage", KEPT)); } catch { /* another program's text under this name */ }
  for (const id of TEXTS) if (typeof fields?.[id] === "string") $(id).value = fields[id];
  for (const id of SWITCHES) $(id).checked = fields?.[id] === true;
  const chats = typeof fields?.isChat === "boolean" ? fields.isChat : CHATS;
  document.querySelector(`[name=mode][value=${chats ? "chat" : "completion"}]`).checked = true;
  if (!$("prompt").value && !chats) $("prompt").value = SAMPLES[0];
  $("key").value = stored("sessionStorage", KEY) ?? "";
}

let drafters = new Map(); // names by model
const drafterOf = (model) => drafters.get(model) ?? drafters.values().next().value ?? "";

async function drawModel() {
  const { body: about } = await ask("/");
  if (!about) return;
  if (about.drafter) followHeads(about.drafter);
  const cards = (await ask("/v1/models")).body?.data ?? [];
  const several = cards.filter(({ parent }) => !parent).length > 1;
  drafters = new Map(cards.map(({ id, parent, drafter }) => [id, drafter ?? cards.find((card) => card.id === parent)?.drafter]));
  const drafter = several ? null : cards[0]?.drafter;
  $("model").replaceChildren(node("b", { textContent: about.model }));
  if (drafter) $("model").append(drafter === "none" ? " without a drafter" : ` with the drafter ${drafter}`);
  const now = $("adapter").value;
  $("adapter").replaceChildren(...cards.map(({ id, parent }) =>
    node("option", { value: parent || several ? id : "", textContent: parent ? `${id} (adapter)` : id, selected: now === id })));
  $("adapters").hidden = cards.length < 2;
}

async function drawLoad() {
  if (document.visibilityState === "hidden") return;
  const { reached, body: load } = await ask("/load");
  const items = (load?.engines ?? []).map((engine, index, all) => {
    const share = Math.min(engine.num_requests / engine.max_num_seqs, 1);
    const meter = shape("svg", { "aria-hidden": "true" }, shape("rect", { height: 6, width: `${100 * share}%` }));
    const name = all.length > 1 ? `Engine ${index + 1}` : "Engine";
    return node("li", {}, `${name}: ${engine.num_requests} of ${engine.max_num_seqs} running`, meter);
  });
  const none = reached ? "No engine is up" : "The server cannot be reached";
  $("load").replaceChildren(...(items.length ? items : [node("li", { textContent: none })]));
  if (reached && !$("model").textContent) drawModel();
}
