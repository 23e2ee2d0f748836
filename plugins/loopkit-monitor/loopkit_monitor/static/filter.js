// What is typed to choose runs: words, comparisons, and, or, not, brackets.
//
//   digits lr<=0.1           both: a word in the name, a tag or the state, and a comparison
//   state=crashed | acc<0.5  either
//   !(model=mlp) -old        not
//   "two words"  name!="a b" texts with blanks
//
// Signs: = != < <= > >= ~ (has the text in it). A name is that of a parameter or a metric, or the end of one.

const SIGNS = ["<=", ">=", "!=", "==", "=", "<", ">", "~"];
const WORDS = new Map([["and", "&"], ["or", "|"], ["not", "!"], ["&&", "&"], ["||", "|"], ["\u2264", "<="], ["\u2265", ">="], ["\u2260", "!="]]);
const PLAIN = /[^\s()|&!<>=~"'\u2264\u2265\u2260]+/y;

/** What cannot be understood, in words. */
export class FilterError extends Error {}

function tokens(text) {
  const made = [];
  let at = 0;
  while (at < text.length) {
    if (/\s/.test(text[at])) { at += 1; continue; }
    const two = text.slice(at, at + 2), one = text[at];
    const begins = !made.length || ["&", "|", "!", "("].includes(made[made.length - 1].sign) || /\s/.test(text[at - 1]);
    if (WORDS.has(two) || SIGNS.includes(two)) { made.push({ sign: WORDS.get(two) ?? two, at }); at += 2; continue; }
    if ("()|&!<>=~\u2264\u2265\u2260".includes(one)) { made.push({ sign: WORDS.get(one) ?? one, at }); at += 1; continue; }
    if (one === '"' || one === "'") {
      const end = text.indexOf(one, at + 1);
      if (end < 0) throw new FilterError(`the ${one} at character ${at + 1} has no end: add another ${one}`);
      made.push({ word: text.slice(at + 1, end), quoted: true, at });
      at = end + 1;
      continue;
    }
    PLAIN.lastIndex = at;
    let [word] = PLAIN.exec(text);
    const where = at;
    at += word.length;
    if (word.length > 1 && word[0] === "-" && begins && !isSigned(made) && Number.isNaN(Number(word))) { made.push({ sign: "!", at: where }); word = word.slice(1); }
    const sign = WORDS.get(word.toLowerCase());
    made.push(sign ? { sign, at: where } : { word, at: where });
  }
  return made;
}

const isSigned = (made) => SIGNS.includes(made[made.length - 1]?.sign);

/** A test of runs from what was typed: `test(look)`, where `look(name)` gives the values of a name, `look()` all words.
 * Raises `FilterError`. */
export function parseFilter(text) {
  const all = tokens(text), asked = [];
  let at = 0;
  const next = () => all[at];
  const shown = (token) => (token === undefined ? "the end" : token.sign ?? `"${token.word}"`);

  function either() {
    const parts = [both()];
    while (next()?.sign === "|") { at += 1; parts.push(both()); }
    return parts.length === 1 ? parts[0] : (look) => parts.some((part) => part(look));
  }
  function both() {
    const parts = [one()];
    while (next() !== undefined && next().sign !== "|" && next().sign !== ")") {
      if (next().sign === "&") at += 1;
      parts.push(one());
    }
    return parts.length === 1 ? parts[0] : (look) => parts.every((part) => part(look));
  }
  function one() {
    const token = next();
    if (token?.sign === "!") { at += 1; const inner = one(); return (look) => !inner(look); }
    if (token?.sign === "(") {
      at += 1;
      const inner = either();
      if (next()?.sign !== ")") throw new FilterError(`the ( at character ${token.at + 1} is not closed: add a )`);
      at += 1;
      return inner;
    }
    if (token?.word === undefined) throw new FilterError(`${shown(token)} ${token ? `at character ${token.at + 1} ` : ""}comes where a word or name=value is expected`);
    at += 1;
    const sign = next()?.sign;
    if (!SIGNS.includes(sign)) { const word = token.word.toLowerCase(); return (look) => look().some((each) => each.includes(word)); }
    at += 1;
    const value = next();
    if (value?.word === undefined) throw new FilterError(`${token.word}${sign} has no value: write ${token.word}${sign}0.1`);
    at += 1;
    asked.push(token.word);
    return comparison(token.word, sign === "==" ? "=" : sign, value.word);
  }

  if (!all.length) return { test: () => true, names: [] };
  const test = either();
  if (next() !== undefined) throw new FilterError(`${shown(next())} at character ${next().at + 1} comes too early: there is no ( before it`);
  return { test, names: asked };
}

function comparison(name, sign, asked) {
  const wanted = Number(asked), low = asked.toLowerCase();
  const isNumber = asked.trim() !== "" && !Number.isNaN(wanted);
  if (["<", "<=", ">", ">="].includes(sign) && !isNumber) throw new FilterError(`${name}${sign}${asked}: ${asked} is no number; = and != compare texts`);
  const equals = (value) => (isNumber && typeof value === "number" ? value === wanted : String(value).toLowerCase() === low);
  const tests = {
    "=": equals, "~": (value) => String(value).toLowerCase().includes(low),
    "<": (value) => typeof value === "number" && value < wanted, "<=": (value) => typeof value === "number" && value <= wanted,
    ">": (value) => typeof value === "number" && value > wanted, ">=": (value) => typeof value === "number" && value >= wanted,
  };
  if (sign === "!=") return (look) => { const values = look(name); return values.length > 0 && !values.some(equals); };
  return (look) => look(name).some(tests[sign]);
}
