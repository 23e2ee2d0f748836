// The home: a table of runs beside the charts of those that are shown.

import { DASH, addressOf, ago, button, choice, count, dot, duration, figure, flag, h, labelled, moment, num, number, popover, searchField, seldom, shown, toolbar } from "./dom.js";
import { FilterError, parseFilter } from "./filter.js";
import { Board } from "./chart.js";
import { boardLook, chartTools, chartsOf, kindOf, marksOf } from "./views.js";
import { brushesOf, isBrushed, mediaView, parallelView, scatterView, settingsView } from "./compare.js";
import { LONGEST_ADDRESS, rangeText, writeState } from "./state.js";

const MOST_AT_FIRST = 8; // runs that are shown until others are chosen: each has a color of its own
const ROWS_AT_ONCE = 60;
const COLORS = 8;
const MODES = { last: "last", min: "lowest", max: "highest" };
const VIEWS = [["charts", "Charts"], ["parallel", "Parallel"], ["scatter", "Scatter"], ["settings", "Settings"], ["media", "Media"]];
const byName = new Intl.Collator("en", { numeric: true });
const byValue = (a, b) => (Number.isFinite(Number(a)) && Number.isFinite(Number(b)) ? a - b : byName.compare(a, b));
/** Settings of the person first, then those of the optimizer, then what follows from the model and the data. */
const importance = (name) => (/^(model\.|world_size$|loss_is_sum$|accumulate$)/.test(name) ? 3 : name === "seed" ? 2 : /^optimizer\b/.test(name) ? 1 : 0);
const byImportance = (a, b) => importance(a.name) - importance(b.name) || byName.compare(a.name, b.name);
const tagsOf = (run) => run.notes?.tags ?? [];
/** What a filter knows beside columns. */
const SPECIAL = { status: (run) => run.status, name: (run) => run.name, run: (run) => run.id, tag: tagsOf, tags: tagsOf, commit: (run) => run.git?.commit, note: (run) => run.notes?.note };
const folderOf = (run) => run.id.slice(0, Math.max(run.id.lastIndexOf("/"), 0));
const meanOf = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;
const isMissing = (value) => value === undefined || value === null || value === "" || Number.isNaN(value);

export class Workspace {
  #most = ROWS_AT_ONCE;
  #path = false; // the runs of the table are in several folders
  #before = null; // what was shown before one run was shown alone

  /** `get()` is the state of the address, `set(changes)` changes it. */
  constructor(data, get, set) {
    Object.assign(this, { data, get, set });
    this.search = h("input", { type: "search", id: "search", placeholder: matchMedia("(max-width: 800px)").matches ? "Filter: words, lr<=0.1" : "Filter: words, lr<=0.1, state!=crashed, a | b", "aria-label": "Filter the runs", "aria-describedby": "filter-said", autocomplete: "off", spellcheck: "false", value: get().q });
    this.search.addEventListener("input", () => this.change({ q: this.search.value }));
    this.said = h("p", { id: "filter-said", class: "said", role: "status", hidden: true });
    this.total = h("span", { class: "muted" });
    this.shown = h("span", {});
    this.wider = button({ class: "small wider" }, () => this.change({ pane: get().pane === "runs" ? "both" : "runs" }), );
    this.holder = h("div", { class: "table runs", tabindex: 0, role: "region", "aria-label": "runs" });
    this.nothing = h("div", { class: "empty", hidden: true });
    this.columnsPop = popover("Columns", () => this.#offer());
    this.group = h("span", {});
    this.panes = h("div", { class: "panes", role: "group", "aria-label": "What is shown" });
    const base = (show, text) => button({ class: "small" }, () => this.change({ show, on: [], off: [] }), text);
    this.left = h("section", { class: "left", "aria-label": "Choose runs" },
      h("div", { class: "bar-of-tools" }, this.search, this.total, this.wider), this.said,
      toolbar(h("span", { class: "eyes" }, this.shown, base("all", "All"), base("none", "None"), base("first", `First ${MOST_AT_FIRST}`)), this.group, this.columnsPop.element,
        flag("archived", get().archived, (archived) => this.change({ archived }))),
      this.holder, this.nothing);
    this.board = new Board(data, () => boardLook(get()), ({ range, tall }) => { this.set(tall ?? { zoom: rangeText(range) }); this.tools.update(); }, (key) => this.point(key));
    this.kind = "metrics";
    this.tools = chartTools(this.board, get, (changes) => { this.set(changes); this.tools.update(); this.#drawViews(); }, [searchField("Filter charts", get().chart, (chart) => this.change({ chart }))]);
    this.charts = h("div", { class: "charts" });
    this.more = h("div", { class: "more-charts" });
    this.tabs = h("div", { class: "tabs views", role: "tablist", "aria-label": "Views of the shown runs" });
    this.view = h("div", { class: "view", role: "tabpanel", id: "view" });
    this.right = h("section", { class: "right", "aria-label": "Charts" }, this.tabs, this.view);
    this.chartView = h("div", {}, this.tools.element, this.board.failure, this.charts, this.more);
    this.sight = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) { this.#most += ROWS_AT_ONCE; this.#fill(); } }, { rootMargin: "400px" });
    this.element = h("div", { class: "workspace" }, h("h1", { class: "unseen" }, "Runs"), this.panes, h("div", { class: "halves" }, this.left, this.right));
    this.refresh = seldom(() => { if (this.element.isConnected) this.draw(); }, 150);
    this.draw();
  }

  end() {
    this.board.end();
    this.sight.disconnect();
  }

  change(changes) {
    this.set(changes);
    if ("q" in changes || "sort" in changes) this.#most = ROWS_AT_ONCE;
    this.draw();
  }

  // --- columns

  #columns(runs, listed) {
    const state = this.get(), metrics = new Map(), settings = new Map(), modes = new Map(state.mode.map((each) => { const at = each.lastIndexOf(":"); return [each.slice(0, at), each.slice(at + 1)]; }));
    for (const run of runs) {
      for (const name of Object.keys(run.last ?? {})) if (!metrics.has(name) && kindOf(name) === "metrics" && !/\/(step|running)$/.test(name)) metrics.set(name, null);
      for (const [name, mode] of Object.entries(run.modes ?? {})) if (metrics.has(name)) metrics.set(name, mode);
      for (const [name, value] of Object.entries(run.hyperparameters ?? {})) {
        const text = JSON.stringify(value);
        if (!settings.has(name)) settings.set(name, { first: text, differs: false, seen: 0 });
        const known = settings.get(name);
        known.seen += 1;
        if (text !== known.first) known.differs = true;
      }
    }
    const made = [...metrics].sort(([a], [b]) => (b.startsWith("val/") - a.startsWith("val/")) || byName.compare(a, b)).map(([name, declared]) => {
      const mode = MODES[modes.get(name)] ? modes.get(name) : declared ?? "last";
      const value = (run) => { const at = run.extents?.[name]; return mode === "last" || !at ? number(run.last?.[name] ?? NaN) : number(mode === "max" ? at[2] : at[0]); };
      return { key: `m:${name}`, name, metric: true, mode, declared, word: MODES[mode], value: (run) => { const found = value(run); return Number.isNaN(found) && run.last?.[name] === undefined ? undefined : found; } };
    });
    const val = made.filter((column) => column.name.startsWith("val/"));
    for (const column of (val.length ? val : made).slice(0, 4)) column.wanted = true;
    const own = [...settings].map(([name, { differs, seen }]) => ({ key: `p:${name}`, name, differs: differs || (seen < runs.length && seen > 0), plugin: name.startsWith("plugins."), value: (run) => run.hyperparameters?.[name] }));
    for (const column of own) {
      const texts = column.differs ? listed.map((run) => JSON.stringify(column.value(run))) : [];
      Object.assign(column, { varies: new Set(texts).size > 1, told: texts.join() });
    }
    const once = (column) => !own.some((other) => other.told === column.told && byImportance(other, column) < 0); // not two of the same content
    own.sort((a, b) => a.plugin - b.plugin || b.varies - a.varies || b.differs - a.differs || byImportance(a, b));
    for (const column of own.filter((each) => (listed.length > 1 ? each.varies : each.differs) && !each.plugin && once(each)).slice(0, 5)) column.wanted = true;
    const fixed = [
      { key: "state", name: "state", wanted: true, value: (run) => run.status, draw: (run) => h("span", { class: "state-word", "data-status": run.status }, run.status) },
      { key: "epoch", name: "epoch", number: true, value: (run) => run.epoch, draw: (run) => (run.planned_epochs ? `${count(run.epoch)} / ${count(run.planned_epochs)}` : count(run.epoch)) },
      { key: "step", name: "step", number: true, value: (run) => run.step, draw: (run) => count(run.step) },
      { key: "duration", name: "duration", number: true, wanted: true, value: (run) => run.updated - run.started, draw: (run) => duration(run.updated - run.started) },
      { key: "started", name: "started", number: true, value: (run) => run.started, draw: (run) => h("span", { title: moment(run.started) }, moment(run.started).slice(0, 16)) },
      { key: "updated", name: "updated", number: true, wanted: true, value: (run) => run.updated, draw: (run) => h("span", { title: moment(run.updated) }, ago(run.updated)) },
      { key: "commit", name: "commit", value: (run) => run.git?.commit?.slice(0, 8), draw: (run) => (run.git ? h("span", { title: run.git.commit }, run.git.commit.slice(0, 8), run.git.dirty ? h("span", { class: "dirty", title: "with changed files" }, " changed") : null) : DASH) },
      { key: "tags", name: "tags", value: (run) => tagsOf(run).join(", ") },
    ].map((column) => ({ ...column, fixed: true }));
    const chosen = new Map(state.col.map((each) => [each.slice(1), each[0] === "+"]));
    const all = [...fixed.slice(0, 1), ...made, ...own, ...fixed.slice(1)];
    for (const column of all) { column.on = chosen.get(column.key) ?? Boolean(column.wanted); column.pinned = state.pin.includes(column.key); }
    return all;
  }

  /** The box in which columns are chosen: a person's own settings first, the options of plugins folded. */
  #offer() {
    const state = () => this.get();
    const line = (column) => {
      const pin = button({ class: "quiet small", "aria-pressed": String(column.pinned), "aria-label": `Pin ${column.name}` }, () => {
        const now = !state().pin.includes(column.key);
        pin.setAttribute("aria-pressed", String(now));
        this.change({ pin: now ? [...state().pin, column.key] : state().pin.filter((key) => key !== column.key) });
      }, "pin");
      return h("li", {}, flag(column.name, column.on, (on) => this.change({ col: [...state().col.filter((each) => each.slice(1) !== column.key), `${on ? "+" : "-"}${column.key}`] })), pin);
    };
    const part = (title, some, folded = false) => (some.length ? folded ? h("details", {}, h("summary", {}, `${title} (${some.length})`), h("ul", {}, some.map(line))) : [h("h4", {}, title), h("ul", {}, some.map(line))] : null);
    const all = this.columns;
    return [part("Settings", all.filter((column) => !column.metric && !column.fixed && !column.plugin)), part("Metrics", all.filter((column) => column.metric)), part("The run", all.filter((column) => column.fixed)),
      part("Options of plugins", all.filter((column) => column.plugin), true), button({}, () => { this.change({ col: [], pin: [] }); this.columnsPop.close(); }, "As at first")].flat(2).filter(Boolean);
  }

  // --- runs

  /** What a filter looks at: all words of a run, or the values of a name. */
  #look(run) {
    const words = [run.id, run.name, run.status, ...tagsOf(run), run.git?.commit ?? ""].map((each) => String(each).toLowerCase());
    return (name) => {
      if (name === undefined) return words;
      const low = name.toLowerCase();
      if (Object.hasOwn(SPECIAL, low)) return [SPECIAL[low](run)].flat().filter((each) => !isMissing(each));
      const own = this.columns.filter((column) => column.name.toLowerCase() === low), some = own.length ? own : this.columns.filter((column) => !column.fixed && new RegExp(`(^|[./_])${low.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`).test(column.name.toLowerCase()));
      return some.map((column) => column.value(run)).filter((each) => !isMissing(each));
    };
  }

  #isKnown(name) {
    const low = name.toLowerCase();
    return Object.hasOwn(SPECIAL, low) || this.columns.some((column) => column.name.toLowerCase() === low || (!column.fixed && column.name.toLowerCase().endsWith(low)));
  }

  #select() {
    const state = this.get(), all = [...this.data.runs.values()];
    const there = this.there = all.filter((run) => state.archived || !run.notes?.archived);
    this.columns = this.#columns(there, there);
    let test = () => true, trouble = "";
    try {
      const parsed = parseFilter(state.q), strange = parsed.names.find((name) => !this.#isKnown(name));
      test = parsed.test;
      if (strange !== undefined && there.length) trouble = `No run has ${strange}.`;
    } catch (error) {
      if (!(error instanceof FilterError)) throw error;
      trouble = `Not understood: ${error.message}.`;
    }
    this.said.textContent = trouble;
    this.said.hidden = !trouble;
    this.search.setAttribute("aria-invalid", String(Boolean(trouble)));
    const brushes = brushesOf(state), way = state.sort.startsWith("-") ? -1 : 1, key = state.sort.replace(/^-/, "");
    const by = key === "name" ? { value: (run) => run.name } : this.columns.find((column) => column.key === key) ?? this.columns.find((column) => column.key === "updated");
    const order = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other : byName.compare(shown(one), shown(other)));
    const live = (run) => (key === "updated" && run.status === "live" ? 1 : 0);
    this.found = there.filter((run) => test(this.#look(run))).filter((run) => state.view !== "parallel" || isBrushed(run, this.columns, brushes)).map((run) => [by.value(run), run])
      .sort(([a, one], [b, other]) => live(other) - live(one) || (isMissing(a) || isMissing(b) ? isMissing(a) - isMissing(b) : way * order(a, b)) || byName.compare(one.id, other.id)).map(([, run]) => run);
    this.unbrushed = state.view === "parallel" ? there.filter((run) => test(this.#look(run))) : this.found;
    if (this.unbrushed.length < there.length) this.columns = this.#columns(there, this.unbrushed);
    this.#path = new Set(this.found.map(folderOf)).size > 1;
    const on = new Set(state.on), off = new Set(state.off), first = new Set(this.found.slice(0, MOST_AT_FIRST).map((run) => run.id));
    this.visible = this.found.filter((run) => on.has(run.id) || (!off.has(run.id) && (state.show === "all" || (state.show === "first" && first.has(run.id)))));
    this.#paint(all);
  }

  /** Each shown run has a color that it keeps: that of its place among the chosen ones, or of its age; beyond eight, dashes differ. */
  #paint(all) {
    const rank = new Map([...all].sort((a, b) => a.started - b.started || byName.compare(a.id, b.id)).map((run, at) => [run.id, at]));
    const state = this.get(), styles = this.styles = new Map(), groups = this.groups = new Map();
    const grouped = this.columns.find((column) => column.key === state.group);
    if (grouped) {
      const of = (run) => shown(grouped.value(run) ?? DASH), sign = state.sort.startsWith("-") ? -1 : 1, by = this.columns.find((column) => column.metric && column.key === state.sort.replace(/^-/, ""));
      this.visible.sort((a, b) => byValue(of(a), of(b)));
      for (const run of this.visible) groups.set(of(run), [...(groups.get(of(run)) ?? []), run]);
      const means = new Map(by ? [...groups].map(([value, runs]) => [value, meanOf(runs.map(by.value).filter(Number.isFinite))]) : []), order = (a, b) => (by ? sign * (means.get(a) - means.get(b)) : 0) || byValue(a, b);
      this.order = [...groups.keys()].sort(order);
      [...groups].forEach(([value, runs], at) => { for (const run of runs) styles.set(run.id, { color: `--s${at % COLORS}`, dash: Math.floor(at / COLORS) % 4, group: value, groupLabel: `${grouped.name} ${value} (${runs.length})` }); });
      return;
    }
    const ordered = [...this.visible].sort((a, b) => rank.get(a.id) - rank.get(b.id)), full = state.show === "first" && ordered.length === MOST_AT_FIRST;
    const free = (taken) => { let place = 0; while (taken.has(place)) place += 1; return place; };
    const places = new Map(ordered.map((run, at) => [run.id, state.show === "none" ? state.on.indexOf(run.id) : full ? rank.get(run.id) % COLORS : at])), taken = new Set();
    for (const run of ordered) {
      const place = taken.has(places.get(run.id)) ? free(taken) : places.get(run.id);
      taken.add(place);
      styles.set(run.id, { place, color: `--s${place % COLORS}`, dash: Math.floor(place / COLORS) % 4 });
    }
  }

  #toggle(run) {
    const state = this.get(), isOn = this.visible.includes(run);
    const without = (list) => list.filter((id) => id !== run.id);
    if (state.show === "all") { this.change({ on: without(state.on), off: isOn ? [...without(state.off), run.id] : without(state.off) }); return; }
    const on = [...state.on]; // a place that is free is empty, so that the others keep their colors
    if (state.show === "first") { on.length = 0; for (const each of this.visible) on[this.styles.get(each.id)?.place ?? on.length] = each.id; }
    const list = Array.from(on, (id) => id ?? ""), at = list.indexOf(run.id), empty = list.indexOf("");
    if (at >= 0) list[at] = ""; else if (empty >= 0) list[empty] = run.id; else list.push(run.id);
    while (list.length && !list[list.length - 1]) list.pop();
    this.change({ show: "none", on: list, off: [] });
  }

  /** Show one run alone; once more, and those that were shown before are back. */
  isolate(run) {
    const { show, on, off } = this.get();
    if (this.visible.length === 1 && this.visible[0] === run && this.#before) { this.change(this.#before); this.#before = null; return; }
    this.#before = { show, on, off };
    this.change({ show: "none", on: [run.id], off: [] });
  }

  /** Draw one run, or a group, above the others in all charts, and mark its rows; null for none. */
  point(key, mine = null) {
    if (key === this.pointed) return;
    this.pointed = key;
    this.board.highlight(key);
    for (const row of this.body?.children ?? []) row.classList.toggle("pointed", key !== null && row !== mine && this.#keyOf(row.dataset.run) === key);
  }

  #keyOf(id) { const style = this.styles.get(id); return style ? style.group ?? id : null; }

  // --- draw

  draw() {
    this.#select();
    this.#drawPanes();
    this.#drawTools();
    this.#drawTable();
    this.#drawViews();
  }

  #drawPanes() {
    const { pane } = this.get();
    this.element.dataset.pane = pane;
    this.wider.textContent = pane === "runs" ? "With charts" : "Only the table";
    this.element.dataset.view = this.get().view; // a link to a view opens it on a phone, which has room for one half
    this.panes.replaceChildren(...[["runs", "Runs"], ["both", "Both"], ["charts", "Charts"]].map(([value, text]) => button({ class: `small pane-${value}`, "aria-pressed": String(pane === value) }, () => this.change({ pane: value }), text)));
  }

  #drawTools() {
    const { data } = this, state = this.get(), left = data.leftOut || !data.searched;
    const known = left ? `${count(this.there.length)} of ${count(this.there.length + data.leftOut)}${data.searched ? "" : "+"}` : count(this.there.length);
    this.total.textContent = data.seq === undefined && !data.failure ? "" : state.q ? `${count(this.found.length)} of ${known} runs` : `${known} run${known === "1" ? "" : "s"}`;
    this.total.title = [data.leftOut ? "those that were written to last" : "", data.searched ? "" : "the folder has too many files to search them all"].filter(Boolean).join("; ");
    this.shown.textContent = `${count(this.visible.length)} shown`;
    const settings = this.columns.filter((column) => !column.metric && !column.fixed && (column.differs || column.key === state.group));
    const options = [["", "no"], ...settings.map((column) => [column.key, column.name])];
    this.group.replaceChildren(labelled("group by", choice("Group by", options, state.group, (group) => this.change({ group, show: group && state.show === "first" ? "all" : !group && state.show === "all" ? "first" : state.show }))),
      state.group ? choice("Band", [["std", "\u00b1 std"], ["range", "range"]], state.band, (band) => { this.change({ band }); this.board.refresh(); }) : "");
  }

  #drawTable() {
    const { data } = this, state = this.get();
    const empty = !this.found.length;
    this.holder.hidden = empty;
    this.nothing.hidden = !empty;
    if (empty) {
      const clear = button({}, () => { this.search.value = ""; this.change({ q: "", brush: [] }); }, "Clear the filter");
      this.nothing.replaceChildren(...(data.failure ? [h("h2", {}, "No answer"), h("p", {}, `${data.failure.message}; it is asked again every two seconds.`)]
        : data.state === "loading" && data.seq === undefined ? [h("p", { class: "loading" }, "Loading the runs")]
          : this.there.length ? [h("h2", {}, "No run matches"), h("p", {}, "The filter takes words, comparisons such as lr<=0.1 or state!=crashed, and or not, and brackets."), clear]
            : data.runs.size ? [h("h2", {}, "All runs are archived"), button({}, () => this.change({ archived: true }), "Show them")]
              : [h("h2", {}, "No runs yet"), h("p", {}, "A run shows up here with the first line of its log. Add this to the plugins of a learner:"), h("pre", {}, 'Monitor("runs/first")')]));
      return;
    }
    const columns = this.columns.filter((column) => column.on).sort((a, b) => b.pinned - a.pinned);
    const best = new Map(columns.filter((column) => column.metric && column.mode !== "last").map((column) => {
      const values = this.found.map(column.value).filter(Number.isFinite);
      return [column.key, values.length > 1 ? (column.mode === "max" ? Math.max(...values) : Math.min(...values)) : NaN];
    }));
    const focused = this.holder.contains(document.activeElement) ? document.activeElement.dataset.key : null, wide = this.holder.scrollLeft, tall = this.holder.scrollTop;
    const sorted = (key) => (state.sort.replace(/^-/, "") === key ? (state.sort.startsWith("-") ? "descending" : "ascending") : null);
    const head = (title, key, more = null, right = false) => h("th", { scope: "col", class: right ? "number" : null, "aria-sort": sorted(key) },
      button({ class: "sort", "data-key": key, title: `${title}: sort` }, () => this.change({ sort: sorted(key) === "ascending" ? `-${key}` : sorted(key) === "descending" ? key : (this.columns.find((column) => column.key === key)?.mode === "max" || ["updated", "started", "duration"].includes(key) ? `-${key}` : key) }), title), more);
    const modeOf = (column) => button({ class: "sort mode", "data-key": `mode ${column.key}`, title: column.declared ? "as the run declares" : "no plugin declares which way it is better: choose", "aria-label": `${column.name}: ${column.word}. Change` }, () => {
      const next = { last: "max", max: "min", min: "last" }[column.mode];
      this.change({ mode: [...state.mode.filter((each) => !each.startsWith(`${column.name}:`)), ...(next === (column.declared ?? "last") ? [] : [`${column.name}:${next}`])] });
    }, column.word);
    const isNumber = new Map(columns.map((column) => [column.key, Boolean(column.metric || column.number || this.found.slice(0, 200).every((run) => isMissing(column.value(run)) || typeof column.value(run) === "number"))]));
    this.row = (run) => {
      const style = this.styles.get(run.id), isOn = Boolean(style);
      const noted = run.notes?.name ? run.id : this.#path ? folderOf(run) : "";
      const row = h("tr", { class: isOn ? "on" : null, "data-run": run.id, on: { pointerenter: () => this.point(this.#keyOf(run.id), row), pointerleave: () => this.point(null), focusin: () => this.point(this.#keyOf(run.id), row), focusout: () => this.point(null) } },
        h("td", { class: "eye-cell" }, button({ class: "eye", "data-key": `eye ${run.id}`, "aria-pressed": String(isOn), "aria-label": `Show ${run.name} in the charts`, title: `${isOn ? "hide in" : "show in"} the charts; with Alt: only this run`, css: { "--run": isOn ? `var(${style.color})` : "transparent" } }, (event) => (event.altKey ? this.isolate(run) : this.#toggle(run)), h("span", { class: "dot", "aria-hidden": "true" }))),
        h("th", { scope: "row", class: "run-cell" }, h("a", { href: addressOf(run.id), "data-key": `run ${run.id}`, title: run.id }, run.name === "." ? "run" : run.name), noted && run.id !== "." ? h("span", { class: "path muted" }, noted) : null,
          tagsOf(run).map((tag) => h("span", { class: "tag" }, tag)), run.notes?.archived ? h("span", { class: "tag" }, "archived") : null),
        columns.map((column) => {
          const value = column.value(run), text = column.draw ? column.draw(run) : isMissing(value) ? DASH : column.metric ? figure(column.name, value) : column.fixed && typeof value === "number" ? num(value) : shown(value);
          const most = best.get(column.key), top = column.metric && value === most;
          return h("td", { class: [isNumber.get(column.key) ? "number" : "", top ? "best" : ""].join(" ").trim() || null, title: top ? `the best ${column.name} of these runs` : column.metric && Number.isFinite(most) && Number.isFinite(value) ? `${num(Number(Math.abs(value - most).toPrecision(3)))} ${column.mode === "max" ? "below" : "above"} the best` : null }, text);
        }));
      return row;
    };
    this.body = h("tbody", {});
    this.holder.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "eye-cell" }, h("span", { class: "unseen" }, "shown")), head("run", "name"), columns.map((column) => head(column.name, column.key, column.metric ? modeOf(column) : null, isNumber.get(column.key))))), this.body));
    this.#fill();
    if (focused) [...this.holder.querySelectorAll("[data-key]")].find((element) => element.dataset.key === focused)?.focus({ preventScroll: true });
    Object.assign(this.holder, { scrollLeft: wide, scrollTop: tall });
  }

  /** Make the rows that are to be seen, or soon are; groups have their means above them. */
  #fill() {
    const columns = this.columns.filter((column) => column.on).sort((a, b) => b.pinned - a.pinned);
    this.body.append(...this.found.slice(this.body.querySelectorAll("tr[data-run]").length, this.#most).map(this.row));
    if (this.groups.size && !this.body.querySelector(".group")) {
      this.body.prepend(...this.order.map((value) => h("tr", { class: "group", on: { pointerenter: () => this.point(value), pointerleave: () => this.point(null) } },
        h("td", { class: "eye-cell" }, dot(this.styles.get(this.groups.get(value)[0].id).color)), h("th", { scope: "row", class: "run-cell" }, `${value}, ${this.groups.get(value).length} runs`),
        columns.map((column) => {
          const values = this.groups.get(value).map(column.value).filter(Number.isFinite), mean = meanOf(values);
          const spread = Math.sqrt(values.reduce((sum, each) => sum + (each - mean) ** 2, 0) / values.length);
          return h("td", { class: "number" }, column.metric && values.length ? `${num(mean)} \u00b1 ${num(Number(spread.toPrecision(2)))}` : "");
        }))));
    }
    this.sight.disconnect();
    if (this.body.querySelectorAll("tr[data-run]").length < this.found.length) this.sight.observe(this.body.lastElementChild);
  }

  #drawViews() {
    const state = this.get();
    this.tabs.replaceChildren(...VIEWS.map(([id, text]) => h("button", { type: "button", role: "tab", id: `view-${id}`, "aria-controls": "view", "aria-selected": String(state.view === id), tabindex: state.view === id ? 0 : -1, on: { click: () => this.change({ view: id }), keydown: (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const to = VIEWS[(VIEWS.findIndex(([each]) => each === id) + by + VIEWS.length) % VIEWS.length][0];
      this.change({ view: to });
      document.getElementById(`view-${to}`).focus();
    } } }, text)));
    this.view.setAttribute("aria-labelledby", `view-${state.view}`);
    const context = { runs: state.view === "parallel" ? this.unbrushed : this.found, visible: this.visible, columns: this.columns, state, change: (changes) => this.change(changes), style: (id) => this.styles.get(id), data: this.data };
    if (state.view === "charts") {
      if (this.view.firstChild !== this.chartView) this.view.replaceChildren(this.chartView);
      this.#drawCharts();
      return;
    }
    const key = JSON.stringify([state.view, context.visible.map((run) => run.id), state.view === "media" ? [state.media, state.shares] : [state.brush, state.axis, state.sx, state.sy, state.sc, state.same, state.mode, this.found.map((run) => [run.id, run.whole, run.step])]]);
    if (this.viewed === key && this.view.firstChild !== this.chartView) return;
    this.viewed = key;
    this.view.replaceChildren({ parallel: parallelView, scatter: scatterView, settings: settingsView, media: mediaView }[state.view](context));
  }

  #drawCharts() {
    const state = this.get(), runs = this.visible.map((run) => ({ id: run.id, name: run.name, names: Object.keys(run.last ?? {}) }));
    const wanted = state.chart.toLowerCase(), style = (id) => this.styles.get(id) ?? { color: "--muted", dash: 0 };
    const kinds = ["metrics", ...(state.hide.includes("updates") ? ["updates"] : []), ...(state.hide.includes("system") ? ["system"] : [])];
    const single = runs.length === 1 && !this.groups.size;
    const all = kinds.flatMap((kind) => chartsOf(single ? [runs[0]] : runs, kind, style)).filter((chart) => `${chart.title} ${chart.curves.map((curve) => curve.name).join(" ")}`.toLowerCase().includes(wanted));
    const elements = this.board.show(all.map((chart) => ({ ...chart, marks: runs.length > 12 || this.groups.size ? [] : marksOf(this.data, chart) })));
    if (elements.length !== this.charts.children.length || elements.some((element, at) => element !== this.charts.children[at])) this.charts.replaceChildren(...elements);
    if (!elements.length) this.charts.replaceChildren(h("div", { class: "empty" }, h("h2", {}, this.visible.length ? "No chart has such a name" : this.found.length ? "No run is shown" : "Nothing to draw"), h("p", {}, this.visible.length ? "Change the filter of the charts." : "Click on the eyes of some runs in the table.")));
    this.more.replaceChildren(...["updates", "system"].map((kind) => flag({ updates: "Also learning rates and gradients", system: "Also the machine" }[kind], state.hide.includes(kind), (on) => this.change({ hide: on ? [...state.hide, kind] : state.hide.filter((each) => each !== kind) }))));
    this.tools.update();
    if (writeState(state).length > LONGEST_ADDRESS) this.board.note.hidden = false;
  }

  /** The next or the one before of the runs, by keyboard. */
  walk(by) {
    const all = [...this.holder.querySelectorAll("tbody tr[data-run] th a")];
    const here = all.indexOf(document.activeElement);
    const to = all[Math.max(0, Math.min(all.length - 1, here < 0 ? 0 : here + by))];
    to?.focus();
    to?.scrollIntoView({ block: "nearest" });
  }

  /** Show the run that has the focus alone, or those that were shown before. */
  isolateFocused() {
    const run = this.data.runs.get(document.activeElement?.closest?.("tr[data-run]")?.dataset.run);
    if (run) this.isolate(run);
  }

  /** Show or hide the run that has the focus. */
  toggleFocused() { document.activeElement?.closest?.("tr[data-run]")?.querySelector(".eye")?.click(); }
}
