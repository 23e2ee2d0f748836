// What the page knows of the runs, kept up to date by the changes that the source tells.

import { number, seldom } from "./dom.js";

export const POINTS = 1600;
const FEWER = [[8, POINTS], [40, 500], [Infinity, 150]]; // points of a curve, if so many runs are shown
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

const seqOf = (id) => Number(String(id ?? "").split(".").pop()) || 0;

/** The mean of all points so far, as the source makes it: `mean` is its sum and count, which go on. */
function smoothed(values, weight, mean = [0, 0]) {
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    mean[0] = mean[0] * weight + value * (1 - weight);
    mean[1] += 1;
    return mean[0] / (1 - weight ** mean[1]);
  });
}

/** A curve as it came, with its mean at every point if it has all of them. */
function prepared(given, weight) {
  const made = { ...given, value: given.value.map(number), weight };
  if (!weight) return made;
  if (given.smooth) made.smooth = { ...given.smooth, value: given.smooth.value.map(number) };
  else if (given.total === given.step.length) {
    const mean = [0, 0];
    made.smooth = { step: [...given.step], time: [...given.time], value: smoothed(made.value, weight, mean) };
    made.mean = mean;
  }
  return made;
}

export class Data extends EventTarget {
  runs = new Map();
  details = new Map();
  behind = false; // the source has not read all runs yet
  #last = undefined; // the last change that the runs have
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
      const known = this.#last;
      const { rows, seq, last, left_out: left, searched, ids, behind } = await this.source.rows(known);
      Object.assign(this, { leftOut: left ?? 0, searched: searched ?? true, behind: Boolean(behind) });
      if (known === undefined) this.runs = new Map();
      for (const row of rows) this.runs.set(row.id, row);
      if (ids) { const there = new Set(ids); for (const id of this.runs.keys()) if (!there.has(id)) this.runs.delete(id); }
      this.#last = last;
      this.seq ??= seq;
      this.failure = null;
      if (this.behind) this.#behindSoon();
    } catch (failure) {
      this.failure = failure;
    }
    this.#tell("list");
    return this.failure === null;
  };

  /** Change what is noted about a run. */
  async note(id, changes) {
    const { notes } = await this.source.note(id, changes);
    const run = this.runs.get(id);
    if (run) Object.assign(run, { notes, name: notes.name || id.split("/").pop() });
    this.#tell("list");
  }

  #refreshSoon = seldom(this.refresh, 250);
  #behindSoon = seldom(this.refresh, 1000); // while the source reads
  #rowsSoon = seldom(this.refresh, 2000); // the best values of runs that go on

  /** All of one run but its points. */
  async open(id) {
    const detail = await this.source.run(id);
    this.details.set(id, detail);
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

  /** Whether a curve is here, with the mean that is asked for, and not fewer points than many runs have. */
  has(id, name, weight = 0, points = 0) {
    const curve = this.curve(id, name);
    if (!curve) return false;
    if (curve.waiting) return true;
    if (curve.step.length < curve.total && (curve.asked ?? POINTS) < points) return false;
    return !weight || curve.weight === weight || this.#soften(curve, weight);
  }

  /** Make another mean of a curve of which all points are here. */
  #soften(curve, weight) {
    if (curve.step.length !== curve.total) return false;
    const mean = [0, 0];
    Object.assign(curve, { weight, mean, smooth: { step: [...curve.step], time: [...curve.time], value: smoothed(curve.value, weight, mean) } });
    return true;
  }

  /** The points that a curve has where so many runs are shown. */
  pointsFor(runs) { return FEWER.find(([most]) => runs <= most)[1]; }

  /** Get curves, `[run, name]`, that are not here yet. */
  async need(pairs, weight = 0, runs = 1) {
    const points = this.pointsFor(runs), byName = new Map(), failures = [];
    for (const [id, name] of pairs) {
      if (this.has(id, name, weight, points)) continue;
      if (!this.#curves.has(id)) this.#curves.set(id, new Map());
      const mine = this.#curves.get(id), known = mine.get(name);
      mine.set(name, { ...(known ?? NOTHING()), waiting: true, weight });
      if (!byName.has(name)) byName.set(name, []);
      byName.get(name).push([id, known]);
    }
    await Promise.all([...byName].map(async ([name, asked]) => {
      try {
        const { curves, seqs } = await this.source.curves(asked.map(([id]) => id), name, { points, smooth: weight });
        for (const [id] of asked) {
          const mine = this.#curves.get(id);
          if (!mine) continue;
          mine.set(name, { ...prepared(curves[id] ?? NOTHING(), weight), asked: points, seq: seqOf(seqs[id]) });
          for (const [data, at] of this.#recent) if (data.run === id) this.#extend(mine, data, at, [name]);
          this.#tell("points", { id, names: [name] });
        }
      } catch (failure) {
        for (const [id, known] of asked) { if (known) this.#curves.get(id)?.set(name, known); else this.#curves.get(id)?.delete(name); }
        failures.push(failure);
      }
    }));
    if (failures.length) throw failures[0];
  }

  /** Curves between two steps, as dense as the source has them. */
  async between(id, names, from, to, weight = 0, points = POINTS) {
    const { series } = await this.source.series(id, names, { points, from: Math.floor(from), to: Math.ceil(to), smooth: weight });
    return new Map(Object.entries(series).map(([name, curve]) => [name, prepared(curve, curve.smooth && weight)]));
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
        curve.weight = -1; // the mean is asked for again
      }
      const points = data.series?.[name] ?? [];
      for (const [step, value, time] of points) {
        curve.step.push(step);
        curve.value.push(number(value));
        curve.time.push(time);
      }
      if (curve.smooth && curve.mean && points.length) {
        const fresh = smoothed(points.map(([, value]) => number(value)), curve.weight, curve.mean);
        points.forEach(([step, , time], at) => { curve.smooth.step.push(step); curve.smooth.time.push(time); curve.smooth.value.push(fresh[at]); });
        if (curve.smooth.step.length > 3 * POINTS) thin(curve.smooth, POINTS);
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
    this.#rowsSoon();
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
        this.#tell("points", { id: data.run, names });
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
    this.#last = undefined;
    await this.refresh();
    for (const id of this.details.keys()) if (this.runs.has(id)) this.#openSoon(id);
    for (const [id, names] of asked) if (this.runs.has(id)) this.#tell("points", { id, names });
  }
}
