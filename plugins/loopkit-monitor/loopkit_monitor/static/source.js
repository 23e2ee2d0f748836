// Where the data comes from: a server that follows the logs, or a report that has all of it inside.

/** `Failure.status` is that of HTTP, or 0 if no answer came. */
export class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The data of this page. */
export function makeSource() {
  const embedded = document.getElementById("loopkit-data");
  return embedded ? new EmbeddedSource(JSON.parse(embedded.textContent)) : new LiveSource();
}

const query = (values) => {
  const made = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    for (const each of Array.isArray(value) ? value : [value]) if (each !== undefined && each !== null) made.append(key, each);
  }
  return made.toString();
};
const RUNS_AT_ONCE = 30; // the first of them are drawn while the others are read
const NAMES_AT_ONCE = 1500; // characters: addresses have an end

class LiveSource {
  live = true;

  async #get(path, values = {}) {
    let answer;
    try {
      answer = await fetch(`${path}?${query(values)}`, { headers: { accept: "application/json" }, cache: "no-store" });
    } catch {
      throw new Failure("the server does not answer", 0);
    }
    if (!answer.ok) throw new Failure(`the server says ${answer.status} ${answer.statusText}`, answer.status);
    return answer.json();
  }

  rows(since) { return this.#get("api/rows", { since }); }
  runs() { return this.#get("api/runs"); }
  run(id) { return this.#get("api/run", { id }); }
  media(id, name, index) { return this.#get("api/media", { id, name, index }); }
  file(id, file) { return `api/file?${query({ id, file })}`; }

  /** Change what is noted about a run: its name, note, tags, or whether it is archived. */
  async note(id, changes) {
    let answer;
    try {
      answer = await fetch("api/note", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ id, changes }) });
    } catch {
      throw new Failure("the server does not answer", 0);
    }
    if (!answer.ok) throw new Failure((await answer.text()).trim() || `the server says ${answer.status}`, answer.status);
    return answer.json();
  }

  /** Curves of one name of several runs: by run, and the last change that they have. */
  async curves(ids, name, { points, smooth } = {}) {
    const made = { curves: Object.create(null), seqs: Object.create(null) };
    const parts = [];
    let room = 0;
    for (const id of ids) {
      room -= encodeURIComponent(id).length + 4;
      if (room < 0 || parts[parts.length - 1].length >= RUNS_AT_ONCE) { parts.push([]); room = NAMES_AT_ONCE; }
      parts[parts.length - 1].push(id);
    }
    await Promise.all(parts.map(async (some) => {
      const answer = await this.#get("api/curves", { id: some, name, points, smooth: smooth || undefined });
      for (const id of some) { made.curves[id] = answer.curves[id]?.[name]; made.seqs[id] = answer.seq; }
    }));
    return made;
  }

  /** Curves by name, of at most `points` points each, of the steps `from` to `to`; `seqs`: the last change each has. */
  async series(id, names, { points, from, to, smooth } = {}) {
    const made = { series: Object.create(null), seqs: Object.create(null) }; // a name can be __proto__
    let rest = [...names];
    while (rest.length) {
      let room = NAMES_AT_ONCE;
      const some = rest.filter((name, at) => (room -= name.length * 3 + 6) > 0 || at === 0);
      rest = rest.slice(some.length);
      const answer = await this.#get("api/series", { id, name: some, points, from, to, smooth: smooth || undefined });
      Object.assign(made.series, answer.series);
      for (const name of some) made.seqs[name] = answer.seq;
    }
    return made;
  }

  /** Be told of changes after `seq`: `change(data, id)`, `reset()`, `state("open" | "lost" | "refused")`. */
  listen(seq, { change, reset, state }) {
    let failed = 0, known = seq;
    const open = () => {
      const events = new EventSource(`events?${query({ since: known })}`);
      const heard = (event) => { known = event.lastEventId || known; };
      events.addEventListener("open", () => { failed = 0; state("open"); });
      events.addEventListener("ping", heard);
      events.addEventListener("change", (event) => { heard(event); change(JSON.parse(event.data), event.lastEventId); });
      events.addEventListener("reset", (event) => { heard(event); reset(); });
      events.addEventListener("error", () => {
        state("lost");
        if (events.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
        events.close();
        failed += 1;
        this.runs().catch((failure) => { if (failure.status === 401 || failure.status === 403) state("refused"); });
        setTimeout(open, Math.min(1000 * failed, 10000));
      });
    };
    open();
  }
}

class EmbeddedSource {
  live = false;
  #data;

  constructor(data) { this.#data = data; }

  async runs() { return this.#data.runs; }

  async rows() {
    const rows = this.#data.runs.runs.map((run) => {
      const detail = this.#data.details[run.id] ?? {}, planned = detail.header?.planned ?? {};
      const extents = Object.fromEntries(Object.entries(detail.best ?? {}).map(([name, [low, high, at, other]]) => [name, [low, at, high, other]]));
      return { whole: true, notes: {}, modes: detail.modes ?? {}, hyperparameters: detail.hyperparameters ?? {}, last: detail.metrics ?? {}, extents, git: detail.header?.git, planned_epochs: planned.epochs ?? null, ...run };
    });
    return { rows, behind: false, last: 0, seq: this.#data.runs.seq };
  }

  async note() { throw new Failure("a report cannot be changed: open the runs with loopkit monitor", 0); }

  async curves(ids, name, options) {
    const made = { curves: Object.create(null), seqs: Object.create(null) };
    for (const id of ids) made.curves[id] = (await this.series(id, [name], options)).series[name];
    return made;
  }

  async run(id) {
    const found = this.#data.details[id];
    if (!found) throw new Failure(`the report has no run ${id}`, 404);
    return found;
  }

  async series(id, names, { from = -Infinity, to = Infinity, smooth } = {}) {
    const made = Object.create(null);
    for (const name of names) {
      const all = this.#data.series[id]?.[name];
      if (!all) continue;
      const keep = all.step.map((step) => from <= step && step <= to);
      const some = (column) => column.filter((_, at) => keep[at]);
      made[name] = { step: some(all.step), value: some(all.value), time: some(all.time), total: all.total ?? all.step.length };
      if (smooth && all.smooths) { // of a long curve, a few means were made of all of its points
        const weight = Object.keys(all.smooths).reduce((best, each) => (Math.abs(each - smooth) < Math.abs(best - smooth) ? each : best));
        made[name].smooth = all.smooths[weight];
      }
    }
    return { series: made, seqs: Object.create(null) };
  }

  async media(id, name, index) {
    const found = this.#data.media?.[id]?.[name] ?? { kind: null, total: 0, first: 0, items: [] };
    return index === undefined ? found : { ...found, items: found.items.filter((item) => item.index === index) };
  }

  file(id, file) { return this.#data.files?.[id]?.[file] ?? ""; }

  listen(seq, { state }) { state("open"); }
}
