// What the page shows, as a part of its address: a reload, or a link, shows the same.

const TEXTS = { q: "", sort: "-updated", show: "first", group: "", band: "std", view: "charts", pane: "both", x: "step", chart: "", sx: "", sy: "", sc: "", media: "", zoom: "" };
const NUMBERS = { smooth: 0 };
const FLAGS = ["logx", "logy", "archived", "same", "shares"];
const LISTS = ["on", "off", "col", "pin", "mode", "axis", "brush", "with", "hide", "tall"];
const MOST = 400; // items of a list
export const LONGEST_ADDRESS = 60_000;

/** The state of an empty address. */
export function emptyState() {
  const made = { page: "home", id: null, tab: "metrics", ...TEXTS, ...NUMBERS };
  for (const name of FLAGS) made[name] = false;
  for (const name of LISTS) made[name] = [];
  return made;
}

/** The state that an address (its part after #) has. */
export function readState(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [kind, id, tab] = path.split("/");
  const plain = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
  const given = new URLSearchParams(query), made = emptyState();
  if (kind === "run" && id) Object.assign(made, { page: "run", id: plain(id), tab: tab || "metrics" });
  for (const name of Object.keys(TEXTS)) if (given.has(name)) made[name] = given.get(name);
  for (const name of Object.keys(NUMBERS)) if (Number.isFinite(Number(given.get(name) ?? NaN))) made[name] = Number(given.get(name));
  for (const name of FLAGS) made[name] = given.get(name) === "1";
  for (const name of LISTS) made[name] = given.getAll(name).slice(0, MOST);
  made.smooth = Math.min(Math.max(made.smooth, 0), 0.999);
  if (!["step", "time", "epoch"].includes(made.x)) made.x = "step";
  return made;
}

/** The address of a state. */
export function writeState(state) {
  const empty = emptyState(), query = new URLSearchParams();
  for (const name of [...Object.keys(TEXTS), ...Object.keys(NUMBERS)]) if (state[name] !== empty[name]) query.set(name, state[name]);
  for (const name of FLAGS) if (state[name]) query.set(name, "1");
  for (const name of LISTS) for (const each of state[name].slice(0, MOST)) query.append(name, each);
  const path = state.page === "run" ? `#/run/${encodeURIComponent(state.id)}/${state.tab}` : "#/";
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** A range in the address: `low..high`. */
export const rangeText = (range) => (range ? range.map((each) => Number(each.toPrecision(8))).join("..") : "");
