// All runs as a table: their parameters and the best values of their metrics, to sort, to filter and to choose from.

import { DASH, count, figure, h, number, seldom, shown } from "./dom.js";
import { kindOf } from "./views.js";
import { scatter } from "./scatter.js";

export const MOST_COMPARED = 8;
const MOST_ROWS = 1000;
const MOST_SHOWN = 60; // rows that are made at once; more are when the last one comes into sight
const READ_AT_ONCE = 6;
const READ_AGAIN_SECONDS = 10; // a run that goes on
const byName = new Intl.Collator("en", { numeric: true });
const BETTER_HIGHER = /(^|[/_])(acc|accuracy|auc|auroc|bleu|f1|iou|precision|psnr|r2|recall|right|score|top_?\d+)(?![a-z])/i;
const CONDITION = /^(.+?)([=<>])(.+)$/;

export class RunsTable {
  #asked = new Map(); // by run: when it was written to last, as it was asked for
  #reading = 0;
  #offered = null; // the columns, until more is known of a run
  #most = MOST_SHOWN;

  /** `settings` outlive the table; `compare` opens runs side by side. */
  constructor(data, settings, compare) {
    this.data = data;
    this.mine = settings.table ??= { text: "", sort: ["run", 1], differs: true, columns: new Map(), modes: new Map(), chosen: new Set() };
    this.search = h("input", { type: "search", value: this.mine.text, placeholder: "name, state, lr=0.1, loss<0.5", "aria-label": "Filter the table" });
    this.search.addEventListener("input", () => { this.mine.text = this.search.value; this.#begin(); });
    this.only = h("input", { type: "checkbox" });
    this.only.checked = this.mine.differs;
    this.only.addEventListener("change", () => { this.mine.differs = this.only.checked; this.draw(); });
    this.compared = h("button", { type: "button", on: { click: () => compare(this.found.filter((run) => this.mine.chosen.has(run.id)).map((run) => run.id).slice(0, MOST_COMPARED)) } });
    this.all = h("input", { type: "checkbox", "aria-label": "Select all shown" });
    this.all.addEventListener("change", () => { for (const { id } of this.found) this.#choose(id, this.all.checked); this.draw(); });
    this.offered = h("div", { class: "offered" });
    this.refresh = seldom(() => { this.#offered = null; if (this.element.isConnected) this.draw(); }, 200);
    this.scatter = scatter(settings.scatter ??= {}, (id) => `#/run/${encodeURIComponent(id)}/metrics`);
    this.sight = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) { this.#most += MOST_SHOWN; this.#fill(); } }, { rootMargin: "400px" });
    this.note = h("span", { class: "muted" });
    this.holder = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "runs" });
    this.element = h("div", { class: "content overview" },
      h("div", { class: "title" }, h("a", { class: "back", href: "#/" }, "\u2039 Runs"), h("h1", {}, "Runs as a table")),
      h("div", { class: "tools" }, this.search, h("label", {}, this.only, "Only what differs"),
        h("details", { class: "choose" }, h("summary", {}, "Columns"), this.offered), this.compared, this.note),
      this.scatter.element, this.holder);
    this.draw();
  }

  #choose(id, yes) { if (yes) this.mine.chosen.add(id); else this.mine.chosen.delete(id); }

  end() { this.sight.disconnect(); }

  /** Other rows come first. */
  #begin() {
    this.#most = MOST_SHOWN;
    this.draw();
  }

  /** Read what the list does not say of a run, a few at a time; of one that goes on, now and then. */
  #read(runs) {
    for (const { id, updated, status } of runs) {
      if (this.#reading >= READ_AT_ONCE) return;
      const known = this.data.rows.get(id)?.updated;
      if (this.#asked.get(id) === updated || updated === known || (status === "live" && updated - known < READ_AGAIN_SECONDS)) continue;
      this.#asked.set(id, updated);
      this.#reading += 1;
      this.data.row(id).catch(() => null).finally(() => { this.#reading -= 1; this.#read(this.latest); this.refresh(); });
    }
  }

  /** Every column that there could be: its key, its title, and the value of a run in it. */
  #columns(runs) {
    const of = (run) => this.data.rows.get(run.id);
    const details = runs.map(of).filter(Boolean);
    const union = (pick) => {
      const names = new Set();
      for (const detail of details) for (const name of Object.keys(pick(detail) ?? {})) names.add(name);
      return [...names].sort(byName.compare);
    };
    const metrics = union((detail) => detail.best).filter((name) => kindOf(name) === "metrics" && !/\/(step|running)$/.test(name)).map((name) => {
      const high = (this.mine.modes.get(name) ?? (BETTER_HIGHER.test(name) ? "highest" : "lowest")) === "highest";
      return { key: `metric ${name}`, name, high, metric: true, value: (run) => number(of(run)?.best?.[name]?.[high ? 1 : 0]), wanted: /^val\//.test(name) };
    });
    const parameters = union((detail) => detail.hyperparameters).map((name) => {
      const value = (run) => of(run)?.hyperparameters?.[name];
      const first = JSON.stringify(details[0].hyperparameters?.[name]);
      const differs = details.some((detail) => JSON.stringify(detail.hyperparameters?.[name]) !== first);
      return { key: `parameter ${name}`, name, value, differs, wanted: !name.startsWith("plugins.") || differs };
    });
    if (metrics.length && !metrics.some((column) => column.wanted)) metrics[0].wanted = true;
    return [...metrics, ...parameters];
  }

  #passes(run, columns) {
    return this.mine.text.toLowerCase().split(/\s+/).filter(Boolean).every((part) => {
      const [, name, sign, asked] = CONDITION.exec(part) ?? [];
      if (!name) return `${run.id} ${run.status}`.toLowerCase().includes(part);
      return columns.some((column) => {
        const value = column.name.toLowerCase().includes(name) ? column.value(run) : undefined;
        if (value === undefined) return false;
        return sign === "=" ? shown(value).toLowerCase() === asked || value === Number(asked) : sign === "<" ? value < Number(asked) : value > Number(asked);
      });
    });
  }

  draw() {
    const latest = this.latest = [...this.data.runs.values()].sort((a, b) => b.started - a.started || byName.compare(a.id, b.id)).slice(0, MOST_ROWS);
    this.#read(latest);
    const offered = this.#offered ??= this.#columns(latest);
    const columns = offered.filter((column) => (this.mine.columns.get(column.key) ?? column.wanted) && (column.metric || column.differs || !this.mine.differs));
    const values = new Map([["run", (run) => run.id], ["state", (run) => run.status], ["step", (run) => run.step], ...offered.map((column) => [column.key, column.value])]);
    const [key, way] = this.mine.sort, value = values.get(key) ?? values.get("run");
    const missing = (each) => each === undefined || each === null || Number.isNaN(each);
    const order = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other : byName.compare(shown(one), shown(other)));
    this.found = latest.filter((run) => this.#passes(run, offered)).map((run) => [value(run), run])
      .sort(([a], [b]) => (missing(a) || missing(b) ? missing(a) - missing(b) : way * order(a, b))).map(([, run]) => run);
    const chosen = this.found.filter((run) => this.mine.chosen.has(run.id)).length;
    this.all.checked = chosen > 0 && chosen === this.found.length;
    this.all.indeterminate = chosen > 0 && !this.all.checked;
    this.compared.disabled = !chosen;
    this.compared.textContent = chosen > MOST_COMPARED ? `Compare the first ${MOST_COMPARED} of ${chosen}` : chosen === 1 ? "Open it" : `Compare ${chosen || ""}`.trim();
    const waits = latest.filter((run) => !this.data.rows.has(run.id)).length;
    this.note.textContent = [`${count(this.found.length)} of ${count(this.data.runs.size)} runs`, waits && this.#reading ? `reading ${count(waits)}` : ""].filter(Boolean).join(", ");
    const head = (title, key, more = null, number = false) => h("th", { scope: "col", class: number ? "number" : null, "aria-sort": this.mine.sort[0] === key ? (way > 0 ? "ascending" : "descending") : null },
      h("button", { type: "button", class: "sort", "data-key": key, on: { click: () => { this.mine.sort = [key, this.mine.sort[0] === key ? -way : 1]; this.#begin(); } } }, title), more);
    const best = (column) => h("button", { type: "button", class: "sort", "data-key": `mode ${column.key}`, "aria-label": `${column.name}: ${column.high ? "highest" : "lowest"}. Change`,
      on: { click: () => { this.mine.modes.set(column.name, column.high ? "lowest" : "highest"); this.#offered = null; this.draw(); } } }, column.high ? "highest" : "lowest");
    const select = (run) => {
      const box = h("input", { type: "checkbox", "data-key": `select ${run.id}`, "aria-label": `Select ${run.id}` });
      box.checked = this.mine.chosen.has(run.id);
      box.addEventListener("change", () => { this.#choose(run.id, box.checked); this.draw(); });
      return box;
    };
    const focused = this.holder.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const wide = this.holder.scrollLeft;
    this.row = (run) => h("tr", { class: this.mine.chosen.has(run.id) ? "differs" : null },
      h("td", {}, select(run)), h("td", {}, h("a", { href: `#/run/${encodeURIComponent(run.id)}/metrics` }, run.id)), h("td", {}, run.status), h("td", { class: "number" }, count(run.step)),
      columns.map((column) => {
        const value = column.value(run);
        return h("td", { class: column.metric ? "number" : null }, missing(value) ? DASH : column.metric ? figure(column.name, value) : shown(value));
      }));
    this.body = h("tbody", {});
    this.holder.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, this.all), head("run", "run"), head("state", "state"), head("step", "step", null, true), columns.map((column) => head(column.name, column.key, column.metric ? best(column) : null, column.metric)))),
      this.body));
    this.#fill();
    this.scatter.update(this.found, offered);
    if (focused) [...this.holder.querySelectorAll("[data-key]")].find((element) => element.dataset.key === focused)?.focus({ preventScroll: true });
    this.holder.scrollLeft = wide;
    const now = offered.map((column) => column.key).join("\n");
    if (now === this.offers) return;
    this.offers = now;
    this.offered.replaceChildren(...offered.map((column) => {
      const box = h("input", { type: "checkbox" });
      box.checked = this.mine.columns.get(column.key) ?? column.wanted;
      box.addEventListener("change", () => { this.mine.columns.set(column.key, box.checked); this.draw(); });
      return h("label", {}, box, column.name);
    }));
  }

  /** Make the rows that are to be seen, or soon are. */
  #fill() {
    this.body.append(...this.found.slice(this.body.childElementCount, this.#most).map(this.row));
    this.sight.disconnect();
    if (this.body.childElementCount < this.found.length) this.sight.observe(this.body.lastElementChild);
  }
}
