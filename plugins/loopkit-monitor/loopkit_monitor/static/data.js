// What the page knows of the runs, kept up to date by the changes that the source tells.

import { number, seldom } from "./dom.js";

export const POINTS = 1600;
const RECENT = 400;
const COLUMNS = ["step", "value", "time"];
const NOTHING = () => ({ step: [], value: [], time: [], total: 0 });

/** Which points of a curve to keep: the first, the last, and both extremes of each part. The source does the same. */
function thin(curve, points) {
  const parts = Math.floor(points / 2), size = Math.ceil(curve.step.length / parts);
  const kept = new Set([0, curve.step.length - 1]);
  for (let begin = 0; begin < curve.step.length; begin += size) {
    let low = -1, high = -1, odd = -1;
    for (let at = begin; at < Math.min(begin + size, curve.step.length); at += 1) {
      const value = curve.value[at];
      if (Number.isNaN(value)) { if (odd < 0) odd = at; continue; }
      if (low < 0 || value < curve.value[low]) low = at;
      if (high < 0 || value > curve.value[high]) high = at;
    }
    for (const at of [low, high, odd]) if (at >= 0) kept.add(at);
  }
  const order = [...kept].sort((a, b) => a - b);
  for (const column of COLUMNS) curve[column] = order.map((at) => curve[column][at]);
}

const numbered = (given) => ({ ...given, value: given.value.map(number) });
const seqOf = (id) => Number(String(id ?? "").split(".").pop()) || 0;

export class Data extends EventTarget {
  runs = new Map();
  details = new Map();
  rows = new Map(); // by run: its parameters and the extremes of its metrics, for the table
  state = "loading"; // of the connection: loading, open, lost, refused
  failure = null; // why there is no list of runs
  leftOut = 0; // runs that the source has found and does not tell of
  searched = true; // the source has looked for runs in all of its folder
  #curves = new Map(); // by run, by name
  #recent = []; // changes that could be newer than an answer that is on its way
  #refreshes = new Map();

  constructor(source) {
    super();
    this.source = source;
  }

  #tell(type, detail) { this.dispatchEvent(new CustomEvent(type, { detail })); }

  async begin() {
    while (!(await this.refresh())) await new Promise((done) => setTimeout(done, 2000));
    this.source.listen(this.seq, {
      change: (data, id) => this.#change(data, seqOf(id)),
      reset: () => this.#reset(),
      state: (state) => { this.state = state; this.#tell("state"); },
    });
  }

  refresh = async () => {
    try {
      const { runs, seq, left_out, searched } = await this.source.runs();
      Object.assign(this, { leftOut: left_out ?? 0, searched: searched ?? true });
      this.runs = new Map(runs.map((run) => [run.id, run]));
      this.seq = seq;
      this.failure = null;
    } catch (failure) {
      this.failure = failure;
    }
    this.#tell("list");
    return this.failure === null;
  };

  /** What the table shows of a run: less than all of it is kept. */
  async row(id) { this.#keep(id, await this.source.run(id)); }

  #keep(id, { best, hyperparameters, updated }) { this.rows.set(id, { best, hyperparameters, updated }); }

  #refreshSoon = seldom(this.refresh, 250);

  /** All of one run but its points. */
  async open(id) {
    const detail = await this.source.run(id);
    this.details.set(id, detail);
    this.#keep(id, detail);
    this.#tell("detail", { id });
    return detail;
  }

  #openSoon(id) {
    if (!this.#refreshes.has(id)) {
      this.#refreshes.set(id, seldom(() => { this.open(id).catch(() => this.#refreshSoon()); }, 400));
    }
    this.#refreshes.get(id)();
  }

  curve(id, name) { return this.#curves.get(id)?.get(name); }

  /** Get curves that are not here yet. */
  async need(id, names) {
    if (!this.#curves.has(id)) this.#curves.set(id, new Map());
    const mine = this.#curves.get(id);
    const missing = names.filter((name) => !mine.has(name));
    for (const name of missing) mine.set(name, { ...NOTHING(), waiting: true });
    if (!missing.length) return;
    try {
      const { series, seqs } = await this.source.series(id, missing, { points: POINTS });
      for (const name of missing) mine.set(name, { ...numbered(series[name] ?? NOTHING()), seq: seqOf(seqs[name]) });
      for (const [data, at] of this.#recent) if (data.run === id) this.#extend(mine, data, at, missing);
    } catch (failure) {
      for (const name of missing) mine.delete(name);
      throw failure;
    }
    this.#tell("points", { id, names: missing });
  }

  /** Curves between two steps, as dense as the source has them. */
  async between(id, names, from, to) {
    const { series } = await this.source.series(id, names, { points: POINTS, from: Math.floor(from), to: Math.ceil(to) });
    return new Map(Object.entries(series).map(([name, curve]) => [name, numbered(curve)]));
  }

  /** Add a change to the curves whose answer did not have it yet. */
  #extend(curves, data, seq, names = [...curves.keys()]) {
    for (const name of names) {
      const curve = curves.get(name);
      if (!curve || curve.waiting || seq <= curve.seq) continue;
      curve.seq = seq;
      if (data.cut !== undefined) {
        let count = curve.step.length;
        while (count && curve.step[count - 1] > data.cut) count -= 1;
        curve.total -= curve.step.length - count;
        for (const column of COLUMNS) curve[column].length = count;
      }
      const points = data.series?.[name] ?? [];
      for (const [step, value, time] of points) {
        curve.step.push(step);
        curve.value.push(number(value));
        curve.time.push(time);
      }
      curve.total += points.length;
      if (curve.step.length > 3 * POINTS) thin(curve, POINTS);
    }
  }

  #change(data, seq) {
    this.#recent.push([data, seq]);
    if (this.#recent.length > RECENT) this.#recent.shift();
    const known = this.runs.get(data.run);
    if (data.removed) {
      this.runs.delete(data.run);
      this.#tell("list");
      return;
    }
    if (data.new || !known) { this.#refreshSoon(); return; }
    const before = known.status;
    for (const key of ["status", "step", "epoch", "updated", "metrics"]) if (data[key] !== undefined) known[key] = data[key];
    if (known.status !== before) this.#refreshSoon();
    const detail = this.details.get(data.run);
    if (detail) {
      const names = new Map(detail.names.map((each) => [each.name, each]));
      const fresh = Object.keys(data.series ?? {}).some((name) => !names.has(name)) ||
        Object.entries(data.kinds ?? {}).some(([name, total]) => names.get(name)?.count !== total);
      if (data.reload || data.cut !== undefined || fresh || data.epoch > (detail.epochs.at(-1)?.[0] ?? 0) || known.status !== before) this.#openSoon(data.run);
    }
    const curves = this.#curves.get(data.run);
    if (curves) {
      if (data.reload) {
        const names = [...curves.keys()];
        this.#curves.delete(data.run);
        this.need(data.run, names).catch(() => {});
      } else {
        this.#extend(curves, data, seq);
        this.#tell("points", { id: data.run, names: data.cut === undefined ? Object.keys(data.series ?? {}) : null });
      }
    }
    this.#tell("run", { id: data.run });
  }

  /** Ask for all of it again: some changes were missed. */
  async #reset() {
    this.#recent = [];
    const asked = [...this.#curves].map(([id, curves]) => [id, [...curves.keys()]]);
    this.#curves.clear();
    await this.refresh();
    for (const id of this.details.keys()) if (this.runs.has(id)) this.#openSoon(id);
    for (const [id, names] of asked) if (this.runs.has(id)) this.need(id, names).catch(() => {});
  }
}
