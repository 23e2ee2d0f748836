// Runs beside each other: parallel coordinates, a scatter, their settings, and what they logged beside numbers.

import { DASH, addressOf, button, choice, count, dot, empty, flag, h, isThere, label, labelled, muted, num, number, remark, shown, svg, toolbar } from "./dom.js";
import { linearTicks, logTicks, tick } from "./plot.js";
import { mediaItem, MEDIA } from "./views.js";

const LOGARITHMIC = 50; // the largest to the smallest, from which on a scale of positive numbers is one of logarithms
const MOST_SIDES = 12; // runs whose settings are beside each other
const MOST_MEDIA = 6; // runs whose media are
const MOST_AXES = 8;

/** Where values lie on an axis: numbers by size, at powers of ten if they are far apart; all else by name. */
function axisOf(values, begin, end, most = 5) {
  const numbers = values.filter(Number.isFinite);
  if (numbers.length && numbers.length === values.length) {
    const low = Math.min(...numbers), high = Math.max(...numbers), log = low > 0 && high / low >= LOGARITHMIC;
    const bent = log ? Math.log10 : (value) => value, size = bent(high) - bent(low);
    const place = (value) => (size ? begin + ((bent(value) - bent(low)) / size) * (end - begin) : (begin + end) / 2);
    const back = (pixel) => { const at = bent(low) + ((pixel - begin) / (end - begin)) * size; return log ? 10 ** at : at; };
    const ticks = !size ? [low] : log ? logTicks(low, high, most) : linearTicks(low, high, most);
    return { place, back, ticks: ticks.map((value) => [value, tick(value, "value")]), log, numeric: true };
  }
  const names = [...new Set(values.map(shown))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const place = (value) => begin + ((names.indexOf(shown(value)) + 0.5) / Math.max(names.length, 1)) * (end - begin);
  return { place, back: (pixel) => pixel, ticks: names.slice(0, 12).map((name) => [name, name.length > 14 ? `${name.slice(0, 13)}\u2026` : name]), log: false, numeric: false, names };
}

/** A color from low to high: the same for all eyes, from dark to light. */
function heat(values, column) {
  const numbers = values.filter(Number.isFinite);
  if (!numbers.length) return () => "var(--s0)";
  const { place } = axisOf(numbers, 0, 1);
  const good = column?.mode === "min" ? (value) => 1 - place(value) : place;
  return (value) => (Number.isFinite(value) ? `color-mix(in oklab, var(--hot) ${(good(value) * 100).toFixed(0)}%, var(--cold))` : "var(--muted)");
}

const optionsOf = (columns) => columns.map((column) => [column.key, column.name + (column.metric ? ` (${column.word})` : "")]);

/** What is chosen, or the best guess that there is. */
function chosen(columns, key, ...guesses) {
  return columns.find((column) => column.key === key) ?? guesses.map((guess) => columns.find(guess)).find(Boolean) ?? columns[0];
}

// --- scatter

export function scatterView({ runs, columns, state, change, style }) {
  const own = columns.filter((column) => !column.fixed), metrics = own.filter((column) => column.metric);
  if (!metrics.length) return empty("No metrics yet", "A scatter shows the runs of the table as dots, by a setting and a metric.");
  const x = chosen(own, state.sx, (column) => !column.metric && column.differs && !column.plugin, (column) => !column.metric), y = chosen(metrics, state.sy, (column) => column.wanted);
  const color = own.find((column) => column.key === state.sc) ?? null;
  const wide = 860, tall = 460, left = 70, bottom = 48, top = 14, right = 20;
  const dots = runs.map((run) => ({ run, x: x.value(run), y: y.value(run), c: color?.value(run) })).filter((dot) => isThere(dot.x) && Number.isFinite(dot.y));
  const tools = h("div", { class: "tools" },
    labelled("across", choice("Across", optionsOf(own), x.key, (sx) => change({ sx }))), labelled("up", choice("Up", optionsOf(metrics), y.key, (sy) => change({ sy }))),
    labelled("color", choice("Color", [["", "the run"], ...optionsOf(own)], color?.key ?? "", (sc) => change({ sc }))));
  if (!dots.length) return h("div", {}, tools, empty("No run has both", "Choose another setting or metric."));
  const xs = axisOf(dots.map((dot) => dot.x), left + 12, wide - right - 12, 8), ys = axisOf(dots.map((dot) => dot.y), tall - bottom - 10, top + 10, 6);
  const tint = color ? heat(dots.map((dot) => dot.c), color) : (_, run) => `var(${style(run.id)?.color ?? "--muted"})`;
  const name = (column, axis) => column.name + (axis.log ? ", log scale" : "");
  const best = y.mode === "last" ? null : dots.reduce((one, other) => ((y.mode === "max" ? other.y > one.y : other.y < one.y) ? other : one));
  return h("div", {}, tools, h("div", { class: "drawn" }, svg("svg", { viewBox: `0 0 ${wide} ${tall}`, role: "group", "aria-label": `${y.name} against ${x.name}, ${dots.length} runs` },
    ys.ticks.map(([value, text]) => [svg("line", { x1: left, x2: wide - right, y1: ys.place(value), y2: ys.place(value) }), label(left - 8, ys.place(value) + 4, "end", text)]),
    xs.ticks.map(([value, text]) => [svg("line", { x1: xs.place(value), x2: xs.place(value), y1: top, y2: tall - bottom }), label(xs.place(value), tall - bottom + 18, "middle", text)]),
    label((left + wide) / 2, tall - 8, "middle", name(x, xs)),
    svg("text", { x: 14, y: tall / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${tall / 2})` }, name(y, ys)),
    dots.map((dot) => {
      const said = `${dot.run.name}: ${x.name} ${shown(dot.x) || DASH}, ${y.name} ${num(dot.y)}${color ? `, ${color.name} ${shown(dot.c)}` : ""}${dot === best ? ", the best" : ""}`;
      return svg("a", { href: addressOf(dot.run.id), "aria-label": said },
        svg("circle", { cx: xs.place(dot.x), cy: ys.place(dot.y), r: dot === best ? 8 : 6, class: dot === best ? "best" : null, fill: tint(dot.c, dot.run) }, svg("title", {}, said)));
    }))));
}

// --- parallel

/** The brushes of the address: by axis, a range. */
export const brushesOf = (state) => new Map(state.brush.map((each) => /^(.*):([^:]+):([^:]+)$/.exec(each)).filter(Boolean).map(([, key, low, high]) => [key, [Number(low), Number(high)]]));

/** Whether a run lies within all brushes. */
export function isBrushed(run, columns, brushes) {
  for (const [key, [low, high]] of brushes) {
    const column = columns.find((each) => each.key === key), value = column?.value(run);
    const at = typeof value === "number" ? value : column?.names?.indexOf(shown(value)) ?? -1;
    if (!column || !isThere(value) || at < low || at > high) return false;
  }
  return true;
}

export function parallelView({ runs, columns, state, change, style }) {
  const own = columns.filter((column) => !column.fixed);
  const guess = [...own.filter((column) => !column.metric && column.wanted), ...own.filter((column) => column.metric && column.wanted).slice(0, 2)];
  const axes = state.axis.length ? state.axis.map((key) => own.find((column) => column.key === key)).filter(Boolean) : guess;
  const offer = toolbar(labelled("add an axis", choice("Add an axis", [["", "\u2026"], ...optionsOf(own.filter((column) => !axes.includes(column)))], "", (key) => key && change({ axis: [...axes.map((axis) => axis.key), key].slice(-MOST_AXES) }))),
    state.brush.length ? button({}, () => change({ brush: [] }), "Clear the brushes") : muted("Drag along an axis to choose runs; the table shows the same ones."));
  if (axes.length < 2) return h("div", {}, offer, empty("Two axes at least", "Settings that differ and metrics become axes; add some above."));
  const wide = 900, tall = 440, top = 54, bottom = 20, side = 60, step = (wide - 2 * side) / (axes.length - 1);
  const last = axes[axes.length - 1], tint = heat(runs.map((run) => last.value(run)), last), brushes = brushesOf(state);
  const scales = axes.map((axis) => axisOf(runs.map(axis.value).filter(isThere), tall - bottom, top, 6));
  axes.forEach((axis, at) => { axis.names = scales[at].names; });
  const lines = runs.map((run) => {
    const points = axes.map((axis, at) => { const value = axis.value(run); return isThere(value) ? `${(side + at * step).toFixed(1)},${scales[at].place(value).toFixed(1)}` : null; }).filter(Boolean);
    const inside = isBrushed(run, own, brushes), color = tint(last.value(run), run);
    return svg("polyline", { points: points.join(" "), class: inside ? "in" : "out", stroke: inside ? color : "var(--line)" }, svg("title", {}, `${run.name}: ${axes.map((axis) => `${axis.name} ${shown(axis.value(run))}`).join(", ")}`));
  });
  const drawn = svg("svg", { viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `${runs.length} runs over ${axes.map((axis) => axis.name).join(", ")}` }, lines);
  axes.forEach((axis, at) => {
    const x = side + at * step, { ticks, back, place, numeric, names } = scales[at], brush = brushes.get(axis.key);
    const pixel = (value) => (numeric ? place(value) : place(names[Math.round(value)] ?? names[0]));
    const area = svg("rect", { x: x - 14, y: top, width: 28, height: tall - top - bottom, class: "grab" });
    const band = svg("rect", { x: x - 7, width: 14, y: brush ? Math.min(...brush.map(pixel)) - 4 : 0, height: brush ? Math.abs(pixel(brush[0]) - pixel(brush[1])) + 8 : 0, class: "brush" });
    let from = null;
    const where = (event) => { const box = drawn.getBoundingClientRect(); return Math.min(Math.max(((event.clientY - box.top) / box.height) * tall, top), tall - bottom); };
    area.addEventListener("pointerdown", (event) => { from = where(event); area.setPointerCapture(event.pointerId); event.preventDefault(); });
    area.addEventListener("pointermove", (event) => { if (from !== null) { const to = where(event); band.setAttribute("y", Math.min(from, to)); band.setAttribute("height", Math.abs(to - from)); } });
    area.addEventListener("pointerup", (event) => {
      const to = where(event), others = state.brush.filter((each) => !each.startsWith(`${axis.key}:`));
      const [low, high] = [back(Math.max(from, to)), back(Math.min(from, to))];
      const inside = numeric ? null : names.map((name, i) => [i, place(name)]).filter(([, y]) => y >= Math.min(from, to) && y <= Math.max(from, to)).map(([i]) => i);
      const made = numeric ? `${axis.key}:${Number(low.toPrecision(8))}:${Number(high.toPrecision(8))}` : `${axis.key}:${Math.min(...inside)}:${Math.max(...inside)}`;
      change({ brush: Math.abs(to - from) < 4 || (inside && !inside.length) ? others : [...others, made] });
      from = null;
    });
    drawn.append(svg("line", { x1: x, x2: x, y1: top, y2: tall - bottom, class: "axis" }),
      ...ticks.map(([value, label]) => svg("text", { x: at === axes.length - 1 ? x + 9 : x - 9, y: place(value) + 4, "text-anchor": at === axes.length - 1 ? "start" : "end", class: "halo" }, label)),
      svg("text", { x, y: top - 16 - (at % 2) * 15, "text-anchor": at === 0 ? "start" : at === axes.length - 1 ? "end" : "middle", class: "title" }, axis.name + (scales[at].log ? " (log)" : "")), area, band);
  });
  const removed = toolbar(axes.map((axis) => button({ class: "quiet chip", "aria-label": `Remove the axis ${axis.name}` }, () => change({ axis: axes.filter((each) => each !== axis).map((each) => each.key), brush: state.brush.filter((each) => !each.startsWith(`${axis.key}:`)) }), `${axis.name} \u00d7`)));
  return h("div", {}, offer, h("div", { class: "drawn parallel" }, drawn), removed);
}

// --- settings

export function settingsView({ visible, columns, state, change, style }) {
  const runs = visible.slice(0, MOST_SIDES);
  if (!runs.length) return empty("No run is shown", "Click on the eyes of some runs in the table.");
  const row = (name, values, plugin = false) => ({ name, values, plugin, differs: values.some((each) => each !== values[0]) });
  const rows = columns.filter((column) => !column.metric && !column.fixed).map((column) => row(column.name, runs.map((run) => { const given = column.value(run); return given === undefined ? DASH : shown(given) || DASH; }), column.plugin));
  rows.push(row("commit", runs.map((run) => (run.git ? run.git.commit.slice(0, 10) + (run.git.dirty ? ", changed" : "") : DASH))));
  const differing = rows.filter((each) => each.differs), same = state.same ? rows.filter((each) => !each.differs) : [];
  const grid = (title, lines) => (lines.length ? h("div", { class: "table sides", tabindex: 0, role: "region", "aria-label": title }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, title), runs.map((run) => h("th", { scope: "col" }, dot(style(run.id)?.color ?? "--muted"), h("a", { href: addressOf(run.id, "parameters") }, run.name))))), h("tbody", {}, lines))) : null);
  const part = (title, some) => grid(title, some.map(({ name, values, differs }) => h("tr", { class: differs ? "differs" : null }, h("th", { scope: "row" }, name), values.map((each) => h("td", { class: /^-?[\d.,e-]+$/.test(each) ? "number" : null }, each)))));
  return h("div", {}, toolbar(flag("Also what is the same", state.same, (on) => change({ same: on })),
    muted(`${differing.length} of ${rows.length} differ${visible.length > runs.length ? `; the first ${runs.length} of ${visible.length} shown runs` : ""}`)),
    grid("Metrics", columns.filter((column) => column.metric && column.wanted).map((column) => {
      const values = runs.map(column.value), numbers = values.filter(Number.isFinite), best = column.mode === "last" || numbers.length < 2 ? NaN : Math[column.mode](...numbers);
      return h("tr", {}, h("th", { scope: "row" }, `${column.name} (${column.word})`), values.map((each) => h("td", { class: each === best ? "number best" : "number" }, isThere(each) ? num(each) : DASH)));
    })),
    part("Different", differing), part("The same", same.filter((each) => !each.plugin)), part("Options of the plugins, the same", same.filter((each) => each.plugin)),
    differing.length ? null : remark(runs.length > 1 ? "They have the same settings." : "Show a second run to compare with."));
}

// --- media

/** What was logged under one name by several runs, at several steps. */
export function mediaView({ visible, state, change, style, data }) {
  const runs = visible.slice(0, MOST_MEDIA), holder = h("div", {});
  if (!runs.length) return empty("No run is shown", "Click on the eyes of some runs in the table.");
  holder.append(h("p", { class: "loading" }, "Reading what the runs have logged"));
  const fill = async () => {
    const details = await Promise.all(runs.map((run) => Promise.resolve(data.details.get(run.id) ?? data.open(run.id)).catch(() => null)));
    const found = new Map();
    for (const detail of details) for (const each of detail?.names ?? []) if (MEDIA.includes(each.kind) && !each.name.startsWith("run/")) found.set(each.name, each.kind);
    if (!found.size) { holder.replaceChildren(empty("No media", "Images, matrices, histograms and texts that these runs log are shown here, side by side.")); return; }
    const name = found.has(state.media) ? state.media : [...found.keys()].sort((a, b) => MEDIA.indexOf(found.get(a)) - MEDIA.indexOf(found.get(b)))[0], kind = found.get(name);
    const items = await Promise.all(runs.map((run) => data.source.media(run.id, name).then((answer) => answer.items ?? []).catch(() => [])));
    const steps = [...new Set(items.flat().map((item) => item.step))].sort((a, b) => a - b), latest = steps.slice(-3);
    const tools = toolbar(labelled("name", choice("Name", [...found].map(([each]) => [each, each]), name, (media) => change({ media }))),
      kind === "table" ? flag("Shares of each row", state.shares, (shares) => change({ shares })) : null,
      steps.length > 3 ? muted(`${count(steps.length)} steps; the slider chooses three`) : null);
    const grid = h("div", { class: "sides media-grid", css: { "grid-template-columns": `minmax(90px, auto) repeat(${Math.max(latest.length, 1)}, minmax(200px, 1fr))` } });
    const show = (end) => {
      const some = steps.slice(Math.max(end - 3, 0), end);
      grid.replaceChildren(h("span", {}), ...some.map((step) => h("strong", {}, `step ${count(step)}`)),
        ...runs.flatMap((run, at) => [h("span", {}, dot(style(run.id)?.color ?? "--muted"), run.name),
          ...(kind === "histogram" && items[at].length > 2 ? [h("div", { css: { "grid-column": `span ${some.length}` } }, histogramsOverTime(items[at], name))]
            : some.map((step) => { const item = items[at].findLast((each) => each.step === step); return h("div", {}, item ? mediaItem(data, run.id, item, kind, state.shares) : muted(DASH)); }))]));
    };
    const slider = steps.length > 3 && kind !== "histogram" ? h("input", { type: "range", min: Math.min(3, steps.length), max: steps.length, step: 1, value: steps.length, "aria-label": "The last step shown", on: { input: () => show(Number(slider.value)) } }) : null;
    if (slider) tools.append(slider);
    show(steps.length);
    holder.replaceChildren(tools, grid, visible.length > runs.length ? remark(`The first ${runs.length} of ${visible.length} shown runs.`) : "");
  };
  fill();
  return holder;
}

/** Histograms as columns over the steps: the darker, the more values. */
export function histogramsOverTime(items, name) {
  const some = items.slice(-120), wide = 480, tall = 200, left = 52, bottom = 22;
  const low = Math.min(...some.map((item) => number(item.edges?.[0]))), high = Math.max(...some.map((item) => number(item.edges?.[item.edges.length - 1])));
  const y = (value) => tall - bottom - ((value - low) / (high - low || 1)) * (tall - bottom - 6), each = (wide - left - 6) / some.length;
  return h("div", { class: "drawn" }, svg("svg", { viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `histograms of ${name} over ${some.length} steps` },
    some.map((item, at) => {
      const counts = item.counts.map(number), most = Math.max(...counts, 1e-12);
      return counts.map((value, bin) => (value > 0 ? svg("rect", { x: left + at * each, width: each + 0.3, y: y(number(item.edges[bin + 1])), height: Math.max(y(number(item.edges[bin])) - y(number(item.edges[bin + 1])), 0.5), class: "cell", "fill-opacity": (0.08 + 0.92 * Math.sqrt(value / most)).toFixed(3) }, svg("title", {}, `step ${count(item.step)}: ${num(number(item.edges[bin]))} to ${num(number(item.edges[bin + 1]))}: ${num(value)}`)) : null));
    }),
    linearTicks(low, high, 5).map((value) => label(left - 6, y(value) + 4, "end", tick(value, "value"))),
    svg("text", { x: left, y: tall - 6 }, `step ${count(some[0].step)}`), label(wide - 6, tall - 6, "end", `step ${count(some[some.length - 1].step)}`)));
}
