// The home: a table of runs beside the charts of those that are shown.

import { DASH, ago, choice, count, duration, figure, flag, h, labelled, moment, num, number, popover, seldom, shown } from "./dom.js";
import { FilterError, parseFilter } from "./filter.js";
import { Board } from "./chart.js";
import { boardLook, chartTools, chartsOf, kindOf } from "./views.js";
import { brushesOf, isBrushed, mediaView, parallelView, scatterView, settingsView } from "./compare.js";
import { LONGEST_ADDRESS, rangeText, writeState } from "./state.js";

const MOST_AT_FIRST = 8; // runs that are shown until others are chosen: each has a color of its own
const ROWS_AT_ONCE = 60;
const COLORS = 8;
const MODES = { last: "last", min: "lowest", max: "highest" };
const VIEWS = [["charts", "Charts"], ["parallel", "Parallel"], ["scatter", "Scatter"], ["settings", "Settings"], ["media", "Media"]];
const byName = new Intl.Collator("en", { numeric: true });
const byValue = (a, b) => (Number.isFinite(Number(a)) && Number.isFinite(Number(b)) ? a - b : byName.compare(a, b));
const isMissing = (value) => value === undefined || value === null || value === "" || Number.isNaN(value);

export class Workspace {
  #most = ROWS_AT_ONCE;
  #pop = [];

  /** `get()` is the state of the address, `set(changes)` changes it. */
  constructor(data, get, set) {
    Object.assign(this, { data, get, set });
    this.search = h("input", { type: "search", id: "search", placeholder: matchMedia("(max-width: 800px)").matches ? "Filter: words, lr<=0.1" : "Filter: words, lr<=0.1, state!=crashed, a | b", "aria-label": "Filter the runs", "aria-describedby": "filter-said", autocomplete: "off", spellcheck: "false", value: get().q });
    this.search.addEventListener("input", () => this.change({ q: this.search.value }));
    this.said = h("p", { id: "filter-said", class: "said", role: "status", hidden: true });
    this.total = h("span", { class: "muted" });
    this.shown = h("span", {});
    this.holder = h("div", { class: "table runs", tabindex: 0, role: "region", "aria-label": "runs" });
    this.nothing = h("div", { class: "empty", hidden: true });
    this.columnsPop = popover("Columns", () => this.#offer());
    this.group = h("span", {});
    this.panes = h("div", { class: "panes", role: "group", "aria-label": "What is shown" });
    const base = (show, text) => h("button", { type: "button", class: "small", on: { click: () => this.change({ show, on: [], off: [] }) } }, text);
    this.left = h("section", { class: "left", "aria-label": "Choose runs" },
      h("div", { class: "bar-of-tools" }, this.search, this.total), this.said,
      h("div", { class: "tools" }, h("span", { class: "eyes" }, this.shown, base("all", "All"), base("none", "None"), base("first", `First ${MOST_AT_FIRST}`)), this.group, this.columnsPop.element,
        flag("archived", get().archived, (archived) => this.change({ archived }))),
      this.holder, this.nothing);
    this.board = new Board(data, () => boardLook(get()), ({ range }) => { this.set({ zoom: rangeText(range) }); this.tools.update(); });
    this.kind = "metrics";
    this.chartFilter = h("input", { type: "search", placeholder: "Filter charts", "aria-label": "Filter charts", value: get().chart });
    this.chartFilter.addEventListener("input", () => this.change({ chart: this.chartFilter.value }));
    this.tools = chartTools(this.board, get, (changes) => { this.set(changes); this.tools.update(); this.#drawViews(); }, [this.chartFilter]);
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

  // ----------------------------------------------------------------------------------------------------------- columns

  #columns(runs) {
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
    const own = [...settings].sort(([a], [b]) => byName.compare(a, b)).map(([name, { differs, seen }]) => ({ key: `p:${name}`, name, differs: differs || (seen < runs.length && seen > 0), plugin: name.startsWith("plugins."), value: (run) => run.hyperparameters?.[name] }));
    own.sort((a, b) => a.plugin - b.plugin);
    for (const column of own.filter((each) => each.differs && !each.plugin).slice(0, 5)) column.wanted = true;
    const fixed = [
      { key: "state", name: "state", wanted: true, value: (run) => run.status, draw: (run) => h("span", { class: "state-word", "data-status": run.status }, run.status) },
      { key: "epoch", name: "epoch", number: true, value: (run) => run.epoch, draw: (run) => (run.planned_epochs ? `${count(run.epoch)} / ${count(run.planned_epochs)}` : count(run.epoch)) },
      { key: "step", name: "step", number: true, value: (run) => run.step, draw: (run) => count(run.step) },
      { key: "duration", name: "duration", number: true, wanted: true, value: (run) => run.updated - run.started, draw: (run) => duration(run.updated - run.started) },
      { key: "started", name: "started", number: true, value: (run) => run.started, draw: (run) => h("span", { title: moment(run.started) }, moment(run.started).slice(0, 16)) },
      { key: "updated", name: "updated", number: true, wanted: true, value: (run) => run.updated, draw: (run) => h("span", { title: moment(run.updated) }, ago(run.updated)) },
      { key: "commit", name: "commit", value: (run) => run.git?.commit?.slice(0, 8), draw: (run) => (run.git ? h("span", { title: run.git.commit }, run.git.commit.slice(0, 8), run.git.dirty ? h("span", { class: "dirty", title: "with changed files" }, " changed") : null) : DASH) },
      { key: "tags", name: "tags", value: (run) => (run.notes?.tags ?? []).join(", ") },
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
      const pin = h("button", { type: "button", class: "quiet small", "aria-pressed": String(column.pinned), "aria-label": `Pin ${column.name}`, on: { click: () => {
        const now = !state().pin.includes(column.key);
        pin.setAttribute("aria-pressed", String(now));
        this.change({ pin: now ? [...state().pin, column.key] : state().pin.filter((key) => key !== column.key) });
      } } }, "pin");
      return h("li", {}, flag(column.name, column.on, (on) => this.change({ col: [...state().col.filter((each) => each.slice(1) !== column.key), `${on ? "+" : "-"}${column.key}`] })), pin);
    };
    const part = (title, some, folded = false) => (some.length ? folded ? h("details", {}, h("summary", {}, `${title} (${some.length})`), h("ul", {}, some.map(line))) : [h("h4", {}, title), h("ul", {}, some.map(line))] : null);
    const all = this.columns;
    return [part("Settings", all.filter((column) => !column.metric && !column.fixed && !column.plugin)), part("Metrics", all.filter((column) => column.metric)), part("The run", all.filter((column) => column.fixed)),
      part("Options of plugins", all.filter((column) => column.plugin), true), h("button", { type: "button", on: { click: () => { this.change({ col: [], pin: [] }); this.columnsPop.close(); } } }, "As at first")].flat(2).filter(Boolean);
  }

  // ------------------------------------------------------------------------------------------------------------- runs

  /** What a filter looks at: all words of a run, or the values of a name. */
  #look(run) {
    const words = [run.id, run.name, run.status, ...(run.notes?.tags ?? []), run.git?.commit ?? ""].map((each) => String(each).toLowerCase());
    return (name) => {
      if (name === undefined) return words;
      const low = name.toLowerCase(), special = { state: run.status, status: run.status, name: run.name, run: run.id, step: run.step, epoch: run.epoch, tag: run.notes?.tags, tags: run.notes?.tags, duration: run.updated - run.started, commit: run.git?.commit, note: run.notes?.note };
      if (low in special) return [special[low]].flat().filter((each) => !isMissing(each));
      const own = this.columns.filter((column) => column.name.toLowerCase() === low), some = own.length ? own : this.columns.filter((column) => !column.fixed && new RegExp(`(^|[./_])${low.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`).test(column.name.toLowerCase()));
      return some.map((column) => column.value(run)).filter((each) => !isMissing(each));
    };
  }

  #isKnown(name) {
    const low = name.toLowerCase();
    return ["state", "status", "name", "run", "step", "epoch", "tag", "tags", "duration", "commit", "note"].includes(low) || this.columns.some((column) => column.name.toLowerCase() === low || (!column.fixed && column.name.toLowerCase().endsWith(low)));
  }

  #select() {
    const state = this.get(), all = [...this.data.runs.values()];
    const there = this.there = all.filter((run) => state.archived || !run.notes?.archived);
    this.columns = this.#columns(there);
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
    const on = new Set(state.on), off = new Set(state.off), first = new Set(this.found.slice(0, MOST_AT_FIRST).map((run) => run.id));
    this.visible = this.found.filter((run) => on.has(run.id) || (!off.has(run.id) && (state.show === "all" || (state.show === "first" && first.has(run.id)))));
    this.#paint(all);
  }

  /** Each shown run has a color that it keeps, as far as no other one has it; beyond eight, dashes differ. */
  #paint(all) {
    const rank = new Map([...all].sort((a, b) => a.started - b.started || byName.compare(a.id, b.id)).map((run, at) => [run.id, at]));
    const state = this.get(), styles = this.styles = new Map(), groups = this.groups = new Map();
    const grouped = this.columns.find((column) => column.key === state.group);
    if (grouped) {
      for (const run of this.visible) { const value = shown(grouped.value(run) ?? DASH); groups.set(value, [...(groups.get(value) ?? []), run]); }
      [...groups.keys()].sort(byValue).forEach((value, at) => { for (const run of groups.get(value)) styles.set(run.id, { color: `--s${at % COLORS}`, dash: Math.floor(at / COLORS) % 4, group: value, groupLabel: `${grouped.name} ${value} (${groups.get(value).length})` }); });
      return;
    }
    const taken = new Set(), ordered = [...this.visible].sort((a, b) => rank.get(a.id) - rank.get(b.id));
    ordered.forEach((run, at) => {
      let color = rank.get(run.id) % COLORS;
      if (ordered.length <= COLORS) while (taken.has(color)) color = (color + 1) % COLORS;
      else color = at % COLORS;
      taken.add(color);
      styles.set(run.id, { color: `--s${color}`, dash: ordered.length > COLORS ? Math.floor(at / COLORS) % 4 : 0 });
    });
  }

  #toggle(run) {
    const state = this.get(), isOn = this.visible.includes(run);
    const without = (list) => list.filter((id) => id !== run.id);
    const first = this.visible.map((each) => each.id);
    if (state.show === "first") this.change({ show: "none", on: isOn ? first.filter((id) => id !== run.id) : [...first, run.id], off: [] });
    else this.change({ on: isOn ? without(state.on) : [...without(state.on), run.id], off: isOn && state.show === "all" ? [...without(state.off), run.id] : without(state.off) });
  }

  // ------------------------------------------------------------------------------------------------------------- draw

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
    this.element.dataset.view = this.get().view; // a link to a view opens it on a phone, which has room for one half
    this.panes.replaceChildren(...[["runs", "Runs"], ["both", "Both"], ["charts", "Charts"]].map(([value, text]) => h("button", { type: "button", class: `small pane-${value}`, "aria-pressed": String(pane === value), on: { click: () => this.change({ pane: value }) } }, text)));
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
      state.group ? choice("Band", [["std", "mean \u00b1 std"], ["range", "lowest to highest"]], state.band, (band) => { this.change({ band }); this.board.refresh(); }) : "");
  }

  #drawTable() {
    const { data } = this, state = this.get();
    const empty = !this.found.length;
    this.holder.hidden = empty;
    this.nothing.hidden = !empty;
    if (empty) {
      const clear = h("button", { type: "button", on: { click: () => { this.search.value = ""; this.change({ q: "", brush: [] }); } } }, "Clear the filter");
      this.nothing.replaceChildren(...(data.failure ? [h("h2", {}, "No answer"), h("p", {}, `${data.failure.message}; it is asked again every two seconds.`)]
        : data.state === "loading" && data.seq === undefined ? [h("p", { class: "loading" }, "Loading the runs")]
          : this.there.length ? [h("h2", {}, "No run matches"), h("p", {}, "The filter takes words, comparisons such as lr<=0.1 or state!=crashed, and or not, and brackets."), clear]
            : data.runs.size ? [h("h2", {}, "All runs are archived"), h("button", { type: "button", on: { click: () => this.change({ archived: true }) } }, "Show them")]
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
      h("button", { type: "button", class: "sort", "data-key": key, title: `${title}: sort`, on: { click: () => this.change({ sort: sorted(key) === "ascending" ? `-${key}` : sorted(key) === "descending" ? key : (this.columns.find((column) => column.key === key)?.mode === "max" || ["updated", "started", "duration"].includes(key) ? `-${key}` : key) }) } }, title), more);
    const modeOf = (column) => h("button", { type: "button", class: "sort mode", "data-key": `mode ${column.key}`, title: column.declared ? "as the run declares" : "no plugin declares which way it is better: choose", "aria-label": `${column.name}: ${column.word}. Change`, on: { click: () => {
      const next = { last: "max", max: "min", min: "last" }[column.mode];
      this.change({ mode: [...state.mode.filter((each) => !each.startsWith(`${column.name}:`)), ...(next === (column.declared ?? "last") ? [] : [`${column.name}:${next}`])] });
    } } }, column.word);
    const isNumber = new Map(columns.map((column) => [column.key, Boolean(column.metric || column.number || this.found.slice(0, 200).every((run) => isMissing(column.value(run)) || typeof column.value(run) === "number"))]));
    this.row = (run) => {
      const style = this.styles.get(run.id), isOn = Boolean(style);
      return h("tr", { class: isOn ? "on" : null, "data-run": run.id },
        h("td", { class: "eye-cell" }, h("button", { type: "button", class: "eye", "data-key": `eye ${run.id}`, "aria-pressed": String(isOn), "aria-label": `Show ${run.name} in the charts`, title: isOn ? "hide in the charts" : "show in the charts", css: { "--run": isOn ? `var(${style.color})` : "transparent" }, on: { click: () => this.#toggle(run) } }, h("span", { class: "dot", "aria-hidden": "true" }))),
        h("th", { scope: "row", class: "run-cell" }, h("a", { href: `#/run/${encodeURIComponent(run.id)}/metrics`, "data-key": `run ${run.id}`, title: run.id }, run.name === "." ? "run" : run.name), run.name !== run.id && run.id !== "." ? h("span", { class: "path muted" }, run.id) : null,
          (run.notes?.tags ?? []).map((tag) => h("span", { class: "tag" }, tag)), run.notes?.archived ? h("span", { class: "tag" }, "archived") : null),
        columns.map((column) => {
          const value = column.value(run), text = column.draw ? column.draw(run) : isMissing(value) ? DASH : column.metric ? figure(column.name, value) : typeof value === "number" ? num(value) : shown(value);
          const top = column.metric && value === best.get(column.key);
          return h("td", { class: [isNumber.get(column.key) ? "number" : "", top ? "best" : ""].join(" ").trim() || null, title: top ? `the best ${column.name} of these runs` : null }, text);
        }));
    };
    this.rowOf = this.found;
    this.body = h("tbody", {});
    this.holder.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "eye-cell" }, h("span", { class: "unseen" }, "shown")), head("run", "name"), columns.map((column) => head(column.name, column.key, column.metric ? modeOf(column) : null, isNumber.get(column.key))))), this.body));
    this.#fill();
    if (focused) [...this.holder.querySelectorAll("[data-key]")].find((element) => element.dataset.key === focused)?.focus({ preventScroll: true });
    Object.assign(this.holder, { scrollLeft: wide, scrollTop: tall });
  }

  /** Make the rows that are to be seen, or soon are; runs of a group stand together, with its mean. */
  #fill() {
    const columns = this.columns.filter((column) => column.on).sort((a, b) => b.pinned - a.pinned);
    this.body.append(...this.found.slice(this.body.querySelectorAll("tr[data-run]").length, this.#most).map(this.row));
    if (this.groups.size && !this.body.querySelector(".group")) {
      this.body.prepend(...[...this.groups].sort(([a], [b]) => byValue(a, b)).map(([value, runs]) => h("tr", { class: "group" },
        h("td", { class: "eye-cell" }, h("span", { class: "dot", css: { background: `var(${this.styles.get(runs[0].id).color})` } })), h("th", { scope: "row", class: "run-cell" }, `${value}, ${runs.length} run${runs.length === 1 ? "" : "s"}`),
        columns.map((column) => {
          const values = runs.map(column.value).filter(Number.isFinite), mean = values.reduce((sum, each) => sum + each, 0) / values.length;
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
    const marks = (chart) => (runs.length > 12 || this.groups.size ? [] : chart.curves.flatMap((curve) => {
      const run = this.data.runs.get(curve.run), mode = run?.modes?.[curve.name], at = run?.extents?.[curve.name];
      return mode && at ? [{ run: curve.run, step: mode === "max" ? at[3] : at[1], value: number(mode === "max" ? at[2] : at[0]), color: curve.color, title: `the best of ${run.name}` }] : [];
    }));
    const elements = this.board.show(all.map((chart) => ({ ...chart, marks: marks(chart) })));
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

  /** Show or hide the run that has the focus. */
  toggleFocused() { document.activeElement?.closest?.("tr[data-run]")?.querySelector(".eye")?.click(); }
}
