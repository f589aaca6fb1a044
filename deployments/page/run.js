// A run is one streamed answer: its rounds, its text, and the arrival times of its tokens.
const DEEPEST = 6; // number of shades for depths

// Why a round had no draft, by its `plain_reason`.
const REASONS = {
  plain: "drafting does not pay at this load",
  probe_plain: "the server measured the speed of plain decoding",
  idle: "there was nothing to draft from yet, or no room for more tokens",
  no_drafter: "the server has no drafter now",
  drafter_lost: "the drafter was lost and has not been replaced yet",
  drafter_late: "the drafter has not answered in time",
  text: "trees made of earlier text were worth more than a draft",
  not_asked: "the request turned speculation off",
  no_room: "the KV cache had no room for a draft tree",
  not_usable: "there was no draft worth verifying",
};
// Drafters that copy from earlier text draft nothing for text that is new.
const OF_TEXT = ["ngram", "suffix"];
const NOTHING = "the text so far has no passage that it could continue";
const RARELY = "it was skipped, because its recent drafts saved less time than they cost";
const reasonOf = ({ plain_reason: reason }, drafter) => {
  if (OF_TEXT.includes(drafter) && ["not_usable", "idle"].includes(reason)) return NOTHING;
  if (OF_TEXT.includes(drafter) && reason === "plain") return RARELY;
  return REASONS[reason] ?? `the server gives the reason ${reason}`;
};

class Run {
  constructor(speculative, pane, drafter) {
    Object.assign(this, { speculative, pane, drafter, rounds: [], spans: [], text: "", content: "", times: [], seed: null });
    this.output = pane.querySelector(".text");
    this.prose = pane.querySelector(".prose"); // only in a chat
    this.thoughts = "";
  }
  take(chunk) {
    this.seed = chunk.seed ?? this.seed;
    for (const choice of chunk.choices) {
      const delta = choice.delta ?? {};
      const content = choice.text ?? delta.content ?? "";
      this.content += content;
      this.thoughts += delta.reasoning_content ?? "";
      this.text += (delta.reasoning_content ?? "") + content;
      for (const round of choice.rounds ?? []) this.show(round);
    }
  }
  show(round) {
    const index = this.rounds.push(round) - 1;
    const spans = round.texts.map((text, place) => {
      const span = node("span", { textContent: text });
      const depth = round.depths[place];
      span.dataset.round = index;
      if (this.speculative && depth) span.dataset.depth = Math.min(depth, DEEPEST);
      span.title = depth ? `draft, ${depth} ahead` : "the model's own choice";
      return span;
    });
    this.spans.push(spans);
    this.output.append(...spans);
    this.times.push([performance.now(), round.texts.length]);
  }
  // Renders the answer of a chat as Markdown.
  drawProse() {
    if (!this.prose || this.drawn === this.text) return;
    this.drawn = this.text;
    const thoughts = this.thoughts ? [node("p", { className: "thoughts", dir: "auto", textContent: this.thoughts.trim() })] : [];
    this.prose.replaceChildren(...thoughts, ...markdown(this.content));
  }
  get numTokens() { return this.times.reduce((sum, [, count]) => sum + count, 0); }
  // Tokens per second after the arrival of the first tokens, which are not counted: the time before is not decoding.
  get speed() {
    if (!this.times.length) return null;
    const begin = this.times[0][0], end = this.times.at(-1)[0];
    const later = this.times.reduce((sum, [time, count]) => sum + (time > begin + 1 ? count : 0), 0);
    return end > begin + 1 ? (1000 * later) / (end - begin) : null;
  }
  get drafts() { return this.rounds.filter((round) => round.tree); }
  get plain() { return this.rounds.filter((round) => !round.tree && round.plain_reason !== "prompt"); }
  // A few trial rounds with drafts do not make a drafted run.
  get isDrafted() { return this.drafts.length > this.plain.length; }
  // Why most rounds had no draft; empty if most had one.
  get why() {
    if (this.isDrafted || !this.plain.length) return "";
    const counts = new Map();
    for (const round of this.plain) {
      const reason = reasonOf(round, this.drafter);
      counts.set(reason, (counts.get(reason) ?? 0) + 1);
    }
    const [[reason]] = [...counts].sort(([, one], [, other]) => other - one);
    const whose = this.drafter && this.drafter !== "none" ? ` of ${this.drafter}` : "";
    const drafted = this.drafts.length ? `Only ${this.drafts.length} of ${this.rounds.length} rounds had a draft${whose}` : `No round had a draft${whose}`;
    return `${drafted}: ${reason}.`;
  }
}
