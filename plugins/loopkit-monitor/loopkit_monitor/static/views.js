// What is shown of a run: one function for each tab, which returns its element and how to end it.

import { Board } from "./chart.js";
import { DASH, ago, button, bytes, choice, count, dot, duration, empty, figure, flag, h, label, labelled, moment, muted, num, number, percent, remark, rowsOf, searchField, seldom, short, shown, svg, toolbar, unitOf } from "./dom.js";
import { markdown } from "./markdown.js";
import { rangeText } from "./state.js";

const code = (text) => h("code", {}, text);
const heading = (text, note) => h("h2", { class: "section" }, text, note ? muted(note) : null);

/** A table; cells are text or elements. `numeric` are the columns that are aligned to the right, `long` those of texts. */
function table(columns, rows, { numeric = [], long = [], label, classes = [] } = {}) {
  const kind = (at) => (numeric.includes(at) ? "number" : long.includes(at) ? "long" : null);
  return h("div", { class: "table", tabindex: 0, role: "region", "aria-label": label ?? "table" },
    h("table", {},
      h("thead", {}, h("tr", {}, columns.map((column, at) => h("th", { scope: "col", class: kind(at) }, column)))),
      h("tbody", {}, rows.map((row, line) => h("tr", { class: classes[line] }, row.map((cell, at) => h("td", { class: kind(at) }, cell)))))));
}

/** A name that may be broken where its parts meet. */
const parted = (name) => name.split(/(?<=[._/])/).flatMap((part, at) => (at ? [h("wbr"), part] : [part]));
const nowrap = (text) => h("span", { class: "nowrap", title: text.length > 30 ? text : null }, text);

const bar = (share, name = "") => h("span", { class: "bar", "aria-hidden": "true" },
  h("span", { class: name, css: { width: `${Math.max(0, Math.min(share, 1)) * 100}%` } }));

// --- charts

const UPDATES = /^(run\/)?(lr|loss_scale|skipped_updates|grad_norm|update_ratio)(\/|$)|^(?!final\/).*\/(grad_norm|loss_scale|skipped)$/;
const SYSTEM = /^(resources\/|run\/throughput\/|run\/time_left$)/;
const MOST_CURVES = 8;
const TITLES = {
  lr: "Learning rate", grad_norm: "Gradient norm", loss_scale: "Loss scale", skipped_updates: "Skipped updates",
  skipped: "Skipped updates of an epoch", update_ratio: "Update to parameter ratio",
  "run/throughput/steps_per_second": "Steps a second", "run/throughput/samples_per_second": "Samples a second", "run/time_left": "Time left", "resources/cpu": "Processors",
  "resources/process_cpu": "Processor use of the process", "resources/memory": "Memory of the machine",
  "resources/process_memory": "Memory of the process", gpu: "GPU", gpu_memory: "GPU memory",
};

/** In which chart a curve is: its title, its label there and its unit. */
function place(name, phases, kind) {
  if (kind === "system") {
    const gpu = /^resources\/(gpu\d+)(_memory)?$/.exec(name);
    if (gpu) return { chart: gpu[2] ? "gpu_memory" : "gpu", label: gpu[1], unit: gpu[2] ? "bytes" : "percent" };
    const unit = name === "run/time_left" ? "seconds" : name === "resources/process_memory" ? "bytes"
      : name.startsWith("resources/") ? "percent" : "value";
    return { chart: name, label: name.slice(name.lastIndexOf("/") + 1).replaceAll("_", " "), unit };
  }
  if (kind === "updates") {
    const bare = name.replace(/^run\//, "");
    const chart = /\/(grad_norm|loss_scale|skipped)$/.exec(bare)?.[1] ?? bare.split("/")[0];
    return { chart, label: bare === chart ? chart.replaceAll("_", " ") : bare.replace(`${chart}/`, "").replace(`/${chart}`, ""), unit: "value" };
  }
  const parts = name.split("/");
  const phase = parts.length > 1 && phases.has(parts[0]) ? parts.shift() : "";
  const end = parts.length > 1 && /^(step|running)$/.test(parts[parts.length - 1]) ? parts.pop() : "";
  const chart = (parts.length > 1 ? parts.slice(0, -1).join("/") : parts[0]) + (end ? " within the epoch" : "");
  const label = [phase, parts.length > 1 ? parts[parts.length - 1] : "", { step: "each step", running: "so far" }[end]].filter(Boolean).join(" ");
  return { chart, label: label || name, unit: unitOf(name) };
}

export const kindOf = (name) => (SYSTEM.test(name) ? "system" : UPDATES.test(name) ? "updates" : /^(run|final)\//.test(name) ? "own" : "metrics");

/** The charts of one kind. `runs`: `{id, name, names, phases}`; `style(id)` gives a run's color, dash and group. */
export function chartsOf(runs, kind, style) {
  const charts = new Map();
  for (const run of runs) {
    const all = new Set(run.names), phases = new Set(["train", "val", "test", ...(run.phases ?? [])]);
    for (const name of run.names) {
      if (kindOf(name) !== kind || (/^run\/(lr|grad_norm|loss_scale)/.test(name) && (all.has(name.slice(4)) || all.has(`train/${name.slice(4)}`)))) continue;
      const { chart, label, unit } = place(name, phases, kind);
      if (!charts.has(chart)) charts.set(chart, { chart, unit, labels: new Map() });
      const { labels } = charts.get(chart);
      if (!labels.has(label)) labels.set(label, []);
      labels.get(label).push({ run: run.id, runName: run.name, name });
    }
  }
  const made = [];
  const inOrder = [...charts.values()].sort((a, b) => (kind === "metrics" ? first(a.chart) - first(b.chart) || a.chart.localeCompare(b.chart, "en", { numeric: true }) : 0));
  for (const { chart, unit, labels } of inOrder) {
    const ordered = [...labels].sort(([a], [b]) => rank(a, chart) - rank(b, chart) || a.localeCompare(b, "en", { numeric: true }));
    const pages = Math.ceil(ordered.length / MOST_CURVES);
    for (let page = 0; page < pages; page += 1) {
      const some = ordered.slice(page * MOST_CURVES, (page + 1) * MOST_CURVES);
      const curves = some.flatMap(([label, found], at) => found.map((curve) => {
        if (runs.length < 2) return { ...curve, label, part: label, color: `--s${at % 8}`, dash: at ? 1 + ((at - 1) % 3) : 0 };
        const { color, dash, group, groupLabel } = style(curve.run);
        const several = some.length > 1, own = { key: group ?? curve.run, color, dash: several ? at % 4 : dash, part: several ? label : undefined };
        return { ...curve, ...own, label: several ? `${curve.runName}: ${label}` : curve.runName,
          ...(group === undefined ? {} : { group: `${group}\n${label}`, groupLabel: several ? `${groupLabel}: ${label}` : groupLabel }) };
      }));
      made.push({ key: `${kind} ${chart} ${page}`, title: (TITLES[chart] ?? chart) + (pages > 1 ? ` ${page + 1}/${pages}` : ""), unit, curves });
    }
  }
  return made;
}

/** What all charts have in common, to choose. `state` is read each time; `change` asks for another. */
export function chartTools(board, state, change, more = []) {
  const output = h("output", { for: "smooth" }, num(state().smooth));
  const smooth = h("input", { type: "range", min: 0, max: 0.999, step: 0.001, value: state().smooth, id: "smooth", "aria-label": "Smoothing" });
  const soon = seldom(() => { change({ smooth: Number(smooth.value) }); board.refresh(); }, 30);
  smooth.addEventListener("input", () => { output.textContent = num(Number(smooth.value)); soon(); });
  const set = (changes) => { change(changes); board.refresh(); };
  const all = button({ id: "all" }, () => board.zoom(null), "Show all");
  const element = toolbar(labelled("smoothing", h("span", { class: "slide" }, smooth, output)),
    labelled("over", choice("Horizontal axis", [["step", "step"], ["time", "time"], ["epoch", "epoch"]], state().x, (x) => set({ x, zoom: "" }))),
    flag("log x", state().logx, (logx) => set({ logx })), flag("log y", state().logy, (logy) => set({ logy }), { id: "log" }), more, all);
  return { element, update: () => {
    all.hidden = !state().zoom;
    if (document.activeElement !== smooth) { smooth.value = state().smooth; output.textContent = num(state().smooth); }
  } };
}

/** Marks of the best values in a chart, as far as it is known which way they are better. */
export const marksOf = (data, { curves }) => curves.flatMap(({ run, name, color }) => {
  const { modes, extents } = data.runs.get(run) ?? {}, at = extents?.[name], max = modes?.[name] === "max", value = number(at?.[max ? 2 : 0]);
  return modes?.[name] && Number.isFinite(value) ? [{ run, step: at[max ? 3 : 1], value, color, title: `the best ${name}: ${num(value)}` }] : [];
});

const first = (chart) => (/^loss$/.test(chart) ? 0 : /^loss /.test(chart) ? 2 : chart.endsWith(" within the epoch") ? 3 : 1);

function rank(label, chart) {
  if (label === chart || label === "total") return 0;
  const [phase, ...more] = label.split(" ");
  return 1 + (phase === "train" ? 0 : phase === "val" ? 1 : 2) + (more.includes("far") ? 4 : 0);
}

function charts(kind, nothing) {
  return ({ data, details, state, change, style }) => {
    const runsOf = (some) => some.map((detail) => ({ id: detail.id, name: detail.name, names: detail.names.filter((each) => each.kind === "value").map((each) => each.name), phases: detail.names.map((each) => each.phase).filter(Boolean) }));
    const make = (some) => chartsOf(runsOf(some), kind, style).map((chart) => {
      const only = some.length === 1 ? some[0] : null;
      const kept = only ? saved(only).filter((row) => !row.gone).map((row) => ({ run: only.id, step: row.step, time: row.time, value: NaN, shape: "checkpoint", color: "--muted", title: `checkpoint at step ${count(row.step)}` })) : [];
      return { ...chart, marks: only && kind === "metrics" ? [...kept, ...marksOf(data, chart)] : [] };
    });
    const found = make(details);
    if (!found.length) return { element: empty(...nothing) };
    const board = new Board(data, () => boardLook(state()), ({ range, tall }) => change(tall ?? { zoom: rangeText(range) }));
    const filter = searchField("Filter charts", state().chart, (chart) => { change({ chart }); draw(); });
    const holder = h("div", { class: "charts" }), none = h("p", { class: "muted", hidden: true }, "No chart has such a name.");
    const tools = chartTools(board, state, (changes) => { change(changes); tools.update(); }, found.length > 4 ? [filter] : []);
    const draw = () => {
      const wanted = state().chart.toLowerCase(), some = found.filter((chart) => `${chart.title} ${chart.curves.map((curve) => curve.name).join(" ")}`.toLowerCase().includes(wanted));
      holder.replaceChildren(...board.show(some));
      none.hidden = some.length > 0;
      tools.update();
    };
    draw();
    return { element: h("div", {}, tools.element, board.failure, none, holder), end: () => board.end(), zoomed: () => tools.update() };
  };
}

/** How charts are drawn, of the state of the address. */
export function boardLook(state) {
  const [low, high] = state.zoom.split("..").map(Number);
  return { smooth: state.smooth, x: state.x, logx: state.logx, logy: state.logy, band: state.band, talls: state.tall, range: state.zoom && high > low ? [low, high] : null };
}

// --- hyperparameters

function parameters({ details, style, state, change }) {
  const several = details.length > 1;
  const rowsOver = (pick, show) => [...new Set(details.flatMap((detail) => Object.keys(pick(detail))))].sort()
    .map((name) => ({ name, values: details.map((detail) => (name in pick(detail) ? show(pick(detail)[name], name) : DASH)) }));
  const differs = (row) => row.values.some((each) => each !== row.values[0]);
  const given = rowsOver((detail) => detail.hyperparameters ?? {}, shown);
  const reached = rowsOver((detail) => Object.fromEntries(Object.entries(detail.metrics ?? {}).filter(([name]) => kindOf(name) === "metrics" && !/\/(step|running)$/.test(name))), (value, name) => figure(name, number(value)));
  const grid = (rows, label) => table(["name", ...details.map((detail) => runLabel(detail, style, several))], rows.map((row) => [parted(row.name), ...row.values]),
    { label, long: [0, ...details.map((_, at) => at + 1)], classes: rows.map((row) => (several && differs(row) ? "differs" : null)) });
  const holder = h("div", {});
  let only = several && given.some(differs) && !state().same;
  const draw = () => {
    const wanted = given.filter((row) => !only || differs(row));
    const [own, options] = [false, true].map((plugins) => wanted.filter((row) => row.name.startsWith("plugins.") === plugins));
    holder.replaceChildren(...(own.length ? [grid(own, "hyperparameters")] : options.length ? [] : [remark(given.length ? "They do not differ." : "None were logged.")]),
      ...(options.length ? [heading("Options of the plugins"), grid(options, "options of the plugins")] : []));
  };
  draw();
  const header = details[0].header ?? {};
  const about = Object.entries(header).filter(([key, each]) => !["resumed", "fit", "epoch", "step", "epochs_from"].includes(key) && each !== null)
    .map(([key, each]) => [key, key === "git" ? `${each.commit}${each.dirty ? ", with changed files" : ""}` : key === "time" ? moment(each) : key === "argv" && Array.isArray(each) ? each.join(" ") : key === "planned" && each ? planned(each) : shown(each)]);
  return { element: h("div", {},
    heading("Hyperparameters", several ? `${given.filter(differs).length} of ${given.length} differ` : `${given.length}`),
    toolbar(several ? flag("Only what differs", only, (on) => { only = on; change({ same: !on }); draw(); }) : null, details.map((detail) => copyButton(detail, several))),
    holder,
    reached.length ? [heading("Metrics", "the latest"), grid(reached, "metrics")] : null,
    heading(several ? `Environment of ${details[0].name}` : "Environment"),
    about.length ? table(["what", "value"], about, { label: "environment", long: [1] }) : remark("The log does not say."),
    details[0].config ? [heading("Configuration"), h("pre", {}, typeof details[0].config === "string" ? details[0].config : JSON.stringify(details[0].config, null, 2))] : null) };
}

/** A button that copies the hyperparameters of a run, to paste them into a script or a file. */
function copyButton(detail, several) {
  const text = several ? `Copy those of ${detail.name}` : "Copy as JSON";
  const made = button({ class: "small" }, async () => {
    made.textContent = await navigator.clipboard?.writeText(JSON.stringify(detail.hyperparameters, null, 2)).then(() => "Copied", () => null) ?? "The browser does not allow it";
    setTimeout(() => { made.textContent = text; }, 2000);
  }, text);
  return made;
}

const planned = (each) => Object.entries(each).filter(([, value]) => value !== null).map(([key, value]) => `${value} ${key}`).join(", ") || DASH;
const runLabel = (detail, style, several) => (several ? h("span", {}, dot(style(detail.id).color), detail.name) : "value");

// --- plan

function plan({ details: [detail] }) {
  const rows = rowsOf(detail.plan), cost = rowsOf(detail.cost);
  if (!rows.length && !cost.length) return { element: empty("No plan", "The Monitor plugin logs what explain() says; Cost() adds what each plugin takes.") };
  const spent = new Map(cost.map((row) => [`${row.phase}\n${row.hook}\n${row.plugin}`, row]));
  const own = cost.filter((row) => row.hook !== "device");
  const whole = own.reduce((sum, row) => sum + (number(row.seconds) || 0), 0);
  const sums = new Map();
  for (const row of own) {
    const name = row.plugin || (row.hook === "data" ? "waiting for data" : row.hook === "step" ? "the step itself" : row.hook);
    const sum = sums.get(name) ?? { seconds: 0, plugin: Boolean(row.plugin) };
    sum.seconds += number(row.seconds) || 0;
    sums.set(name, sum);
  }
  const ordered = [...sums].sort(([, a], [, b]) => b.seconds - a.seconds);
  const share = (seconds) => percent((100 * seconds) / (whole || 1));
  const parts = [];
  if (cost.length) {
    parts.push(heading("Where the time goes", `${duration(whole)} in all`), table(["part", "share", "bar", "time"],
      ordered.map(([name, { seconds, plugin }]) => [h("span", { class: "nowrap" }, name), share(seconds), bar(seconds / (whole || 1), plugin ? "" : "strong"), duration(seconds)]),
      { numeric: [1, 3], label: "time by plugin" }));
    const device = cost.filter((row) => row.hook === "device");
    if (device.length) parts.push(remark(`On the device: ${device.map((row) => `${row.phase} ${duration(row.seconds)}`).join(", ")}.`));
  }
  const phases = [...new Set(rows.map((row) => row.phase))];
  for (const phase of phases) {
    const mine = rows.filter((row) => row.phase === phase);
    let before = null;
    const lines = mine.map((row) => {
      const found = spent.get(`${row.phase}\n${row.hook}\n${row.plugin}`);
      const hook = row.hook === before ? "" : code(row.hook);
      before = row.hook;
      const why = [row.reasons, row.note].filter(Boolean).join("; ");
      return [hook, String(row.position ?? ""), h("strong", { class: "nowrap" }, row.plugin), h("span", {}, row.access, why ? h("span", { class: "why" }, why) : null),
        ...(cost.length ? [found ? count(found.calls) : DASH, found ? duration(found.seconds / (found.calls || 1)) : DASH, found ? share(found.seconds) : DASH] : [])];
    });
    parts.push(heading(phase ? `Phase ${phase}` : "The learner"), table(["hook", "", "plugin", "reads and changes", ...(cost.length ? ["calls", "a call", "share"] : [])],
      lines, { numeric: [1, 4, 5, 6], long: [3], label: `plan of ${phase || "the learner"}` }));
  }
  return { element: h("div", {}, parts) };
}

// --- model

function model({ details: [detail] }) {
  const modules = detail.model?.modules;
  if (!Array.isArray(modules) || !modules.length) return { element: empty("No model", "The Monitor plugin logs the modules of the model when the fit begins.") };
  const profile = new Map(rowsOf(detail.profile).map((row) => [row.module, row]));
  const nodes = new Map();
  for (const { name, type, parameters: own } of modules) {
    const numbers = Object.values(own ?? {}).reduce((sum, shape) => sum + shape.reduce((a, b) => a * b, 1), 0);
    nodes.set(name, { name, type, own: own ?? {}, parameters: numbers, children: [], parent: null, open: true });
  }
  const roots = [];
  for (const node of nodes.values()) {
    let up = node.name;
    while (up && !node.parent) {
      up = up.includes(".") ? up.slice(0, up.lastIndexOf(".")) : "";
      if (nodes.has(up)) node.parent = nodes.get(up);
    }
    (node.parent ? node.parent.children : roots).push(node);
  }
  for (const node of [...nodes.values()].reverse()) if (node.parent) node.parent.parameters += node.parameters;
  const time = (row, own) => (row ? (number(row[`forward ${own}seconds`]) || 0) + (number(row[`backward ${own}seconds`]) || 0) : 0);
  const total = Math.max(...[...profile.values()].map((row) => time(row, "")), 0);
  const hottest = Math.max(...[...profile.values()].map((row) => time(row, "own ") || 0), 0) || total;
  const heat = (seconds, most) => ({ "--heat": String(most ? Math.sqrt(Math.min(seconds / most, 1)) : 0) });
  const columns = ["module", "parameters", ...(profile.size ? ["forward", "backward", "own time", "activations", "memory"] : [])];
  const lines = [], cell = (props, ...children) => h("td", { role: "gridcell", ...props }, children);
  const add = (node, depth) => {
    const found = profile.get(node.name);
    const shapes = Object.entries(node.own).map(([key, shape]) => `${key} ${shape.length ? shape.join("\u00d7") : "scalar"}`).join(", ");
    const toggle = h("span", { class: "toggle", "aria-hidden": "true" });
    const line = h("tr", { role: "row", "aria-level": depth + 1, tabindex: lines.length ? -1 : 0, "aria-expanded": node.children.length ? "true" : null },
      cell({ css: { "padding-left": `${8 + depth * 16}px` } }, toggle, h("span", { class: "module" }, node.name.split(".").pop() || "model"), " ",
        muted(node.type), shapes ? h("span", { class: "why" }, shapes) : null),
      cell({ class: "number", title: count(node.parameters) }, short(node.parameters)),
      profile.size ? [
        ...["forward ", "backward "].map((kind) => cell({ class: "number heat", css: heat(number(found?.[`${kind}seconds`]) || 0, total) }, found ? duration(number(found[`${kind}seconds`])) : DASH)),
        cell({ class: "number heat", css: heat(time(found, "own "), hottest) }, found && "forward own seconds" in found ? duration(time(found, "own ")) : DASH),
        ...["activation bytes", "memory bytes"].map((key) => cell({ class: "number" }, found ? bytes(number(found[key])) : DASH)),
      ] : null);
    node.line = line;
    line.addEventListener("click", () => { turn(node); focus(node); });
    lines.push(node);
    for (const child of node.children) add(child, depth + 1);
  };
  roots.forEach((root) => add(root, 0));
  const visible = () => lines.filter((node) => !node.line.hidden);
  const show = () => {
    for (const node of lines) {
      node.line.hidden = Boolean(node.parent && (node.parent.line.hidden || !node.parent.open));
      if (node.children.length) node.line.setAttribute("aria-expanded", String(node.open));
    }
  };
  const turn = (node, open = !node.open) => { if (node.children.length) { node.open = open; show(); } };
  const focus = (node) => { for (const each of lines) each.line.tabIndex = each === node ? 0 : -1; node.line.focus(); };
  const body = h("tbody", {}, lines.map((node) => node.line));
  body.addEventListener("keydown", (event) => {
    const node = lines.find((each) => each.line === event.target);
    if (!node) return;
    const seen = visible(), at = seen.indexOf(node);
    const to = { ArrowDown: seen[at + 1], ArrowUp: seen[at - 1], Home: seen[0], End: seen[seen.length - 1] }[event.key];
    if (to) focus(to);
    else if (event.key === "ArrowRight") { if (node.open && node.children.length) focus(node.children[0]); else turn(node, true); }
    else if (event.key === "ArrowLeft") { if (node.open && node.children.length) turn(node, false); else if (node.parent) focus(node.parent); }
    else if (event.key === "Enter" || event.key === " ") turn(node);
    else return;
    event.preventDefault();
  });
  const every = (open) => { for (const node of lines) if (node.children.length) node.open = open || !node.parent; show(); };
  return { element: h("div", {},
    h("div", { class: "tools" },
      muted(`${count(roots.reduce((sum, root) => sum + root.parameters, 0))} parameters in ${count(nodes.size)} modules`,
        profile.size ? ` \u00b7 profiled at step ${count(detail.profile.step)}: the stronger the color, the longer` : ""),
      button({}, () => every(true), "Open all"), button({}, () => every(false), "Close all")),
    h("div", { class: "table" }, h("table", { role: "treegrid", "aria-label": "modules" },
      h("thead", {}, h("tr", { role: "row" }, columns.map((column, at) => h("th", { role: "columnheader", scope: "col", class: at ? "number" : null }, column)))), body))) };
}

// --- checkpoints

/** Those that were saved, the latest first; `gone` are removed since. */
export function saved(detail) {
  const rows = (detail.checkpoints ?? []).flatMap((each) => {
    let found = rowsOf(each);
    if (typeof each.text === "string") {
      try { found = [JSON.parse(each.text)].flat(); } catch { found = [{ path: each.text }]; }
    }
    return found.map((row) => ({ ...row, epoch: row.epoch ?? each.epoch, step: row.step ?? each.step, time: each.time }));
  });
  const gone = new Set(rows.filter((row) => row.reason === "removed").map((row) => row.path));
  return rows.filter((row) => row.reason !== "removed").map((row) => ({ ...row, gone: gone.has(row.path) })).reverse();
}

/** The one with the best value of the metric that was monitored last; of equal ones the first. */
function bestOf(rows) {
  const { monitor, mode } = rows.find((row) => row.monitor) ?? {};
  const sign = mode === "max" ? -1 : 1;
  return rows.filter((row) => row.monitor === monitor && Number.isFinite(number(row.value)))
    .reduce((best, row) => (best && sign * number(best.value) < sign * number(row.value) ? best : row), null);
}

let showsRemoved = false;

function checkpoints({ details: [detail] }) {
  const rows = saved(detail), best = bestOf(rows), [there, gone] = [false, true].map((gone) => rows.filter((row) => row.gone === gone));
  if (!rows.length) return { element: empty("No checkpoints", "They are listed here once the Checkpoint plugin has saved one, if Monitor() is in the list, too.") };
  const value = (row) => (Number.isNaN(number(row.value)) ? DASH : num(row.value));
  const folders = new Set(rows.map((row) => String(row.path ?? "").replace(/[^/]*$/, "")));
  const folder = folders.size === 1 ? [...folders][0] : "";
  const grid = (some, label) => table(["step", "epoch", "metric", "value", "why", "path", "saved"], some.map((row) => [
    count(row.step), count(row.epoch), row.monitor ? nowrap(`${row.monitor}${row.mode ? ` (${row.mode})` : ""}`) : DASH, value(row),
    h("span", { class: "nowrap" }, row.reason || DASH, row === best ? [" ", h("span", { class: "badge" }, "best")] : null),
    row.gone ? "removed" : code(row.path?.slice(folder.length) ?? DASH), nowrap(moment(row.time))]),
    { numeric: [0, 1, 3], label, classes: some.map((row) => [row === best ? "differs" : "", row.gone ? "gone" : ""].join(" ").trim() || null) });
  const removed = gone.length ? h("details", { class: "removed", on: { toggle: () => { showsRemoved = removed.open; } } }, h("summary", {}, `show removed (${count(gone.length)})`), grid(gone, "removed checkpoints")) : null;
  if (removed) removed.open = showsRemoved;
  return { element: h("div", {}, heading("Checkpoints", `${count(there.length)} kept of ${count(rows.length)} saved, the latest first`),
    folder ? h("p", { class: "muted folder" }, "in ", code(folder)) : null,
    there.length ? grid(there, "checkpoints") : null, removed) };
}

// --- media

export const MEDIA = ["image", "figure", "histogram", "text", "table", "audio", "file"];
const MOST_CARDS = 40;

function media({ data, details: [detail] }) {
  const found = detail.names.filter((each) => MEDIA.includes(each.kind) && !each.name.startsWith("run/"))
    .sort((a, b) => MEDIA.indexOf(a.kind) - MEDIA.indexOf(b.kind) || a.name.localeCompare(b.name, "en", { numeric: true }));
  if (!found.length) return { element: empty("No media", "Images, histograms, text, tables and sounds that are logged are shown here.") };
  const cards = new Map();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); cards.get(entry.target).load(); }
  }, { rootMargin: "200px" });
  const holder = h("div", { class: "cards" });
  const filter = searchField("Filter media", "", () => draw());
  let most = MOST_CARDS;
  const more = button({}, () => { most += MOST_CARDS; draw(); }, "Show more");
  const draw = () => {
    const wanted = found.filter((each) => each.name.toLowerCase().includes(filter.value.toLowerCase()));
    observer.disconnect();
    holder.replaceChildren(...wanted.slice(0, most).map((each) => {
      const made = card(data, detail.id, each);
      cards.set(made.element, made);
      observer.observe(made.element);
      return made.element;
    }));
    more.hidden = wanted.length <= most;
  };
  draw();
  return { element: h("div", {}, found.length > 6 ? toolbar(filter) : null, holder, more),
    end: () => observer.disconnect(),
    update: ({ details: [now] }) => {
      const totals = new Map(now.names.map((each) => [each.name, each.count]));
      for (const made of cards.values()) if (made.element.isConnected) made.grow(totals.get(made.name));
    } };
}

/** One name's card: `load` fills it, `grow` tells it how many there are by now. */
function card(data, id, { name, kind, count: total }) {
  const where = h("span", { class: "where" });
  const body = h("div", { class: "media waiting" });
  const slider = h("input", { type: "range", min: 0, max: total - 1, step: 1, value: total - 1, "aria-label": `Which ${kind} of ${name}`, hidden: total < 2 });
  const items = new Map();
  let asked = 0;
  const get = async (index) => {
    if (!items.has(index)) for (const item of (await data.source.media(id, name, index)).items) items.set(item.index, item);
    return items.get(index);
  };
  const show = async () => {
    const mine = (asked += 1), index = Number(slider.value);
    try {
      const item = await get(index);
      if (mine !== asked) return;
      body.classList.remove("waiting");
      body.replaceChildren(item ? mediaItem(data, id, item, kind) : remark("It is not in the log any more."));
      where.textContent = item ? `step ${count(item.step)}, epoch ${count(item.epoch)}` : "";
    } catch (failure) {
      if (mine === asked) body.replaceChildren(h("p", { class: "notice bad" }, `It could not be read: ${failure.message}.`));
    }
  };
  const load = async () => {
    try {
      const { items: latest, first, total: now } = await data.source.media(id, name);
      for (const item of latest) items.set(item.index, item);
      Object.assign(slider, { min: first, max: now - 1 });
      slider.value = now - 1;
      slider.hidden = now - first < 2;
    } catch { /* `show` says why */ }
    await show();
  };
  const grow = (now) => {
    if (body.classList.contains("waiting") || !(now - 1 > slider.max)) return;
    const latest = slider.value === slider.max;
    Object.assign(slider, { max: now - 1, hidden: false });
    if (latest) { slider.value = now - 1; show(); }
  };
  slider.addEventListener("input", show);
  const element = h("section", { class: `card ${kind}` }, h("h2", {}, h("span", { class: "chart-title" }, name), where), body, slider);
  return { name, element, load, grow };
}

/** What one item is shown as; `shares`: of each row of a matrix, in the place of counts. */
export function mediaItem(data, id, item, kind, shares = false) {
  if (kind === "image" || kind === "figure") {
    return h("figure", {}, h("img", { src: data.source.file(id, item.file), alt: item.caption || item.name, loading: "lazy" }),
      item.caption ? h("figcaption", {}, item.caption) : null);
  }
  if (kind === "audio") return h("audio", { controls: true, preload: "none", src: data.source.file(id, item.file) });
  if (kind === "histogram") return histogram(item);
  if (kind === "table") {
    const columns = Array.isArray(item.columns) ? item.columns : [], rows = Array.isArray(item.rows) ? item.rows : [];
    const numeric = columns.flatMap((_, at) => (rows.some((row) => typeof row[at] === "number") ? [at] : []));
    const made = table(columns, rows.slice(0, 200).map((row) => row.map(shown)), { numeric, label: item.name });
    if (columns[0] === "" && rows.length === columns.length - 1) return matrix(item.name, columns.slice(1), rows, shares);
    const drawn = curves(item.name, columns, rows);
    return h("div", {}, drawn, drawn ? h("details", {}, h("summary", {}, "Numbers"), made) : made,
      rows.length > 200 ? remark(`and ${count(rows.length - 200)} more rows`) : null);
  }
  if (kind === "file") return h("a", { href: data.source.file(id, item.file), download: item.path ?? "" }, item.path ?? item.file);
  return item.text === undefined ? h("pre", {}, JSON.stringify(item, null, 1)) : markdown(item.text);
}

const FEWEST_ROWS = 8, MOST_COLUMNS = 12;

/** A table of numbers whose first column rises, such as precision over recall, as curves; null for any other. */
function curves(name, columns, rows) {
  const across = rows.map((row) => row[0]), rest = columns.slice(1);
  const rises = across.every((value, at) => typeof value === "number" && (at === 0 || value > across[at - 1]));
  const values = rows.map((row) => row.slice(1).map(number));
  const isNumber = (value) => value === null || typeof value === "number" || ["nan", "inf", "-inf"].includes(value);
  if (!rises || rows.length < FEWEST_ROWS || !rest.length || rest.length > MOST_COLUMNS || !rows.flat().every(isNumber)) return null;
  const all = values.flat().filter(Number.isFinite);
  if (!all.length) return null;
  const low = Math.min(...all, 0), high = Math.max(...all, low + 1e-9), wide = 320, tall = 200, left = 36, bottom = 30;
  const x = (value) => left + ((value - across[0]) / (across.at(-1) - across[0])) * (wide - left - 8);
  const y = (value) => tall - bottom - ((value - low) / (high - low)) * (tall - bottom - 8);
  const lines = rest.map((_, at) => svg("path", { class: "curve", stroke: `var(--s${at % 8})`,
    d: values.map((row, line) => (Number.isFinite(row[at]) ? `${line && Number.isFinite(values[line - 1][at]) ? "L" : "M"}${x(across[line]).toFixed(1)} ${y(row[at]).toFixed(1)}` : "")).join("") }));
  return h("div", { class: "plot" },
    svg("svg", { viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `${name}: ${rest.join(", ")} over ${columns[0]}` },
      [low, high].map((value) => [svg("line", { x1: left, x2: wide - 8, y1: y(value), y2: y(value) }), label(left - 6, y(value) + 4, "end", num(value))]),
      label(left, tall - 14, "middle", num(across[0])), label(wide - 8, tall - 14, "end", num(across.at(-1))), label((left + wide) / 2, tall - 3, "middle", `${columns[0]} \u2192`), lines),
    h("p", { class: "keys" }, rest.map((each, at) => h("span", {}, h("i", { css: { background: `var(--s${at % 8})` }, "aria-hidden": "true" }), each))));
}

/** A matrix of confusions: the true class at the left, the predicted one above, counts or shares of each row. */
function matrix(name, classes, rows, shares) {
  const values = rows.map((row) => row.slice(1).map(number)), sums = values.map((row) => row.reduce((sum, each) => sum + (each || 0), 0));
  let as = shares;
  const holder = h("div", {});
  const draw = () => {
    const cells = values.map((row, line) => row.map((each) => (as ? each / (sums[line] || 1) : each))), most = Math.max(...cells.flat().filter(Number.isFinite), 1e-12);
    holder.replaceChildren(h("div", { class: "table matrix", tabindex: 0, role: "region", "aria-label": name }, h("table", {},
      h("thead", {}, h("tr", {}, h("td", {}), h("th", { scope: "colgroup", colspan: classes.length }, "predicted")), h("tr", {}, h("th", { scope: "col" }, "true"), classes.map((each) => h("th", { scope: "col", class: "number" }, each)))),
      h("tbody", {}, rows.map((row, line) => h("tr", {}, h("th", { scope: "row" }, String(row[0])), cells[line].map((each, at) => h("td", { class: "number heat", css: { "--heat": String(Math.max(each / most, 0) || 0) }, title: `true ${row[0]}, predicted ${classes[at]}: ${num(values[line][at])}, ${percent((100 * values[line][at]) / (sums[line] || 1))}` }, as ? percent(100 * each) : num(each)))))))));
  };
  draw();
  return h("div", {}, holder, flag("shares of each row", as, (checked) => { as = checked; draw(); }));
}

function histogram({ counts = [], edges = [], name }) {
  const most = Math.max(...counts.map(number), 1), width = 320, height = 110;
  const bars = counts.map((each, at) => {
    const tall = (number(each) / most) * height;
    return svg("rect", { x: (at * width) / counts.length, y: height - tall, width: Math.max(width / counts.length - 0.6, 0.6), height: tall },
      svg("title", {}, `${num(number(edges[at]))} to ${num(number(edges[at + 1]))}: ${num(number(each))}`));
  });
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `histogram of ${name}` }, bars);
  const sum = counts.reduce((all, each) => all + (number(each) || 0), 0);
  return h("div", { class: "histogram" }, drawn, h("p", { class: "ends" }, h("span", {}, num(number(edges[0]))), muted(`${count(sum)} values`), h("span", {}, num(number(edges[edges.length - 1])))));
}

// --- messages

/** How the run failed, or null. */
export function problem(detail) {
  if (!detail || detail.status !== "crashed") return null;
  const end = detail.end ?? {}, header = detail.header ?? {};
  if (detail.end) {
    const notes = [end.notes ?? []].flat().filter((each) => typeof each === "string");
    const said = [end.by, end.message].filter(Boolean).join(": ");
    return h("div", { class: "notice bad", role: "alert" }, h("strong", {}, "The run ended with an error"),
      h("p", {}, `In epoch ${count(detail.epoch)}, after ${count(detail.step)} training steps. Messages of the engine number the steps of an epoch from 0.`),
      h("pre", {}, end.error ?? end.reason ?? ""), notes.map((note) => h("pre", { class: "note" }, note)), said ? h("p", {}, said) : null,
      end.traceback ? h("details", {}, h("summary", {}, "Traceback"), h("pre", {}, end.traceback)) : null);
  }
  return h("div", { class: "notice bad", role: "alert" }, h("strong", {}, "The run crashed"),
    h("p", {}, `Its process (${header.pid ?? "?"} on ${header.host ?? "?"}) is gone and did not say how it ended: it was killed, or the machine stopped. The last line of the log is of ${moment(detail.updated)}.`));
}

function messages({ details: [detail] }) {
  const warnings = [...(detail.warnings ?? [])].reverse();
  const starts = [...(detail.starts ?? [])].reverse();
  const end = detail.end;
  return { element: h("div", {}, problem(detail),
    heading("Warnings", String(warnings.length)),
    warnings.length ? h("ul", { class: "messages" }, warnings.map((each) => h("li", {}, muted(`step ${count(each.step)} \u00b7 ${moment(each.time)}`), h("pre", {}, each.text ?? JSON.stringify(each)))))
      : remark("None."),
    heading("Begins and ends"),
    table(["what", "when", "step", "epochs", "details"], [
      ...(end ? [["ended", nowrap(moment(end.time)), count(detail.step), count(detail.epoch), [end.reason, end.by, end.message].filter(Boolean).join(" \u00b7 ")]] : []),
      ...starts.map((each) => [each.resumed ? "went on" : "began", nowrap(moment(each.time)), count(each.step), count(each.epoch), ago(each.time)])],
    { numeric: [2, 3], label: "begins and ends" }),
    detail.foreign ? remark(`${count(detail.foreign)} lines of the log are no records; they were left out.`) : null) };
}

// --- tabs

const names = (kind) => ({ details }) => details.flatMap((detail) => detail.names.filter((each) => each.kind === "value" && kindOf(each.name) === kind).map((each) => [detail.id, each.name]));
const firstOf = (pick) => ({ details: [detail] }) => pick(detail);

/** `key` says what a tab depends on: it is made again when that has changed. */
export const TABS = [
  { id: "metrics", label: "Metrics", make: charts("metrics", ["No metrics yet", "They come with the first line that a plugin such as LogMetrics writes."]), key: names("metrics"), several: true },
  { id: "updates", label: "Updates", make: charts("updates", ["Nothing about updates yet", "Learning rates come with LogMetrics(every=...), gradient norms with LogGradients()."]), key: names("updates"), several: true },
  { id: "system", label: "System", make: charts("system", ["Nothing about the machine yet", "LogResources() logs processors, memory and GPUs; Monitor() logs the throughput."]), key: names("system"), several: true },
  { id: "parameters", label: "Parameters", make: parameters, key: ({ details }) => details.map((detail) => [detail.hyperparameters, detail.header, detail.metrics]), several: true },
  { id: "plan", label: "Plan", make: plan, key: firstOf((detail) => [detail.plan, detail.cost]) },
  { id: "model", label: "Model", make: model, key: firstOf((detail) => [detail.model, detail.profile]) },
  { id: "checkpoints", label: "Checkpoints", make: checkpoints, key: firstOf((detail) => detail.checkpoints), count: (detail) => saved(detail).length },
  { id: "media", label: "Media", make: media, key: firstOf((detail) => detail.names.filter((each) => each.kind !== "value").map((each) => each.name)), count: (detail) => detail.names.filter((each) => MEDIA.includes(each.kind) && !each.name.startsWith("run/")).length },
  { id: "messages", label: "Messages", make: messages, key: firstOf((detail) => [detail.warnings, detail.starts, detail.end, detail.status]), count: (detail) => detail.warnings?.length, bad: (detail) => detail.status === "crashed" },
];
