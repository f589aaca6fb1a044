// Requests to the page's own server. Failures become a Problem, whose message says what to do.
class Problem extends Error {}

const UNREACHABLE = "The server cannot be reached. Send again once it is running.";
const CUT_OFF = "The connection ended in the middle of the answer: the server or a proxy in front of it has stopped.";
const NO_ANSWER = "The answer is not from a Wingbeat server: a proxy in front of it may have answered instead.";

const authorization = () => ($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {});

const inWords = (promise, words) => promise.catch((error) => {
  throw error.name === "AbortError" ? error : new Problem(words);
});

// Calls `take` with each chunk of the answer as it arrives.
async function stream(path, body, signal, take) {
  const headers = { "Content-Type": "application/json", ...authorization() };
  const answer = await inWords(fetch(BASE + path, { method: "POST", headers, body: JSON.stringify(body), signal }), UNREACHABLE);
  if (!answer.ok) throw new Problem(await refusal(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await inWords(reader.read(), CUT_OFF);
    if (done) throw new Problem(CUT_OFF);
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = parsed(data);
      if (chunk.error) throw new Problem(chunk.error.message);
      take(chunk);
    }
  }
}

function parsed(data) {
  try { return JSON.parse(data); } catch { throw new Problem(NO_ANSWER); }
}

async function refusal(answer) {
  if (answer.status === 401) $("settings").open = true; // holds the field for the API key
  const said = await answer.json().catch(() => null);
  return said?.error?.message ?? `The server, or a proxy in front of it, answered with status ${answer.status}.`;
}

// JSON answer of the server, or null; `reached` is false if nothing answered.
async function ask(path) {
  const headers = { Accept: "application/json", ...authorization() };
  const answer = await fetch(BASE + path, { headers }).catch(() => null);
  return { reached: Boolean(answer), body: answer?.ok ? await answer.json().catch(() => null) : null };
}
