"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);

/* Text that a policy generated is only inserted with textContent. */
function make(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function shown(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 0.001 && Math.abs(value) < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

/* ---- curves: show the numbers under the pointer */
data.charts.forEach((chart, place) => {
  const plot = at(`chart-${place}`), told = at(`told-${place}`), cursor = make("div", "cursor"), usual = told.textContent;
  cursor.hidden = true;
  plot.append(cursor);
  let number = chart.last;
  function show() {
    const share = chart.left + ((number - chart.first) / (chart.last - chart.first)) * (chart.right - chart.left);
    cursor.style.left = `${100 * share}%`;
    cursor.hidden = false;
    const parts = chart.lines.filter((line) => data.columns[line.column][number] != null).map((line) => {
      const [low, high] = [line.low, line.high].map((end) => end ? data.columns[end][number] : null);
      return `${line.label} ${shown(data.columns[line.column][number])}${low == null ? "" : ` (${shown(low)} to ${shown(high)})`}`;
    });
    told.textContent = `${chart.by} ${number}: ${parts.join(", ") || "no numbers"}`;
  }
  function hide() {
    cursor.hidden = true;
    told.textContent = usual;
  }
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    const found = chart.first + ((share - chart.left) / (chart.right - chart.left)) * (chart.last - chart.first);
    number = Math.min(chart.last, Math.max(chart.first, Math.round(found)));
    show();
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    number = Math.min(chart.last, Math.max(chart.first, number + step));
    show();
  });
});

/* ---- table of all numbers, filled when it is opened */
function fillTable() {
  if (at("numbers").childElementCount) return;
  const names = Object.keys(data.columns), table = make("table"), head = make("thead"), body = make("tbody"), first = make("tr");
  first.append(make("th", "", data.by), ...names.map((name) => make("th", "", name)));
  head.append(first);
  data.rows.forEach((number) => {
    const row = make("tr");
    row.append(make("td", "", number), ...names.map((name) => {
      const value = data.columns[name][number], cell = make("td", "", shown(value));
      if (value !== null) cell.title = String(value);
      return cell;
    }));
    body.append(row);
  });
  table.append(head, body);
  at("numbers").append(table);
}
if (at("all")) at("all").addEventListener("toggle", fillTable);

/* ---- completions */
const groups = data.groups.map((group) => {
  const rewards = group.completions.map((each) => each.reward).filter((reward) => reward != null);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const text = [group.prompt_id, group.prompt, ...group.completions.map((each) => each.text)].join("\n").toLowerCase();
  return {
    ...group, mean, text,
    best: rewards.length ? Math.max(...rewards) : -Infinity,
    worst: rewards.length ? -Math.min(...rewards) : -Infinity,
    spread: rewards.length ? Math.max(...rewards) - Math.min(...rewards) : -1,
    advantage: Math.max(0, ...group.completions.map((each) => Math.abs(each.advantage || 0))),
    length: Math.max(...group.completions.map((each) => each.tokens)),
  };
});
let chosen = null;

function option(select, value, text) {
  const made = make("option", "", text);
  made.value = value;
  select.append(made);
}

function score(completion, term) {
  return term === "reward" ? completion.reward : (completion.terms || {})[term];
}

function fits(completion) {
  const least = at("least").value, most = at("most").value, value = score(completion, at("term").value);
  if (least === "" && most === "") return true;
  return value != null && (least === "" || value >= Number(least)) && (most === "" || value <= Number(most));
}

function matching(batch) {
  const query = at("query").value.toLowerCase(), order = at("order").value;
  const found = groups.filter((group) => group.batch === batch && group.text.includes(query) && group.completions.some(fits));
  return order === "position" ? found : found.sort((one, other) => other[order] - one[order]);
}

/* Return a completion's text, split into spans of tokens with the same mark. */
function written(completion, scale) {
  const pre = make("pre"), tint = at("tint").value, pieces = completion.pieces || [], given = completion.given || [];
  const cut = completion.cut, runs = (completion.advantages || []).flatMap(([count, value]) => Array(count).fill(value));
  const marks = Object.entries(completion.steps || {});
  if (!pieces.length) {
    const place = cut ? cut[0] : completion.text.length;
    pre.append(completion.text.slice(0, place), ...left(cut), completion.text.slice(place));
    return pre;
  }
  let open = null, like = "", where = 0;
  pieces.forEach((size, token) => {
    if (cut && cut[0] === where && size) pre.append(...left(cut));
    marks.forEach(([term, steps]) => steps.filter(([first]) => first === token).forEach(([, value]) => {
      pre.append(make("sup", "", `${term} ${shown(value)}`));
      like = "";
    }));
    const isGiven = given.some(([begin, end]) => token >= begin && token < end);
    const value = tint === "advantage" ? runs[token] : tint === "logprob" ? completion.logprobs[token] / 100 : undefined;
    const kind = isGiven ? "given" : value === undefined ? "" : tint === "logprob" ? "minus" : value > 0 ? "plus" : value < 0 ? "minus" : "";
    const now = `${kind} ${isGiven ? "" : value}`;
    if (now !== like || (cut && cut[0] === where)) {
      open = make("span", kind);
      if (!isGiven && value !== undefined) {
        open.title = `${tint} ${shown(value)}`;
        const heat = tint === "logprob" ? Math.min(1, -value / 5) : Math.abs(value) / scale;
        open.style.setProperty("--heat", (0.45 * heat).toFixed(2));
        if (tint === "logprob" && value > -0.005) open.className = "";
      }
      pre.append(open);
      like = now;
    }
    open.append(completion.text.slice(where, where + size));
    where += size;
  });
  return pre;
}

function left(cut) {
  return cut ? [make("i", "cut", ` … ${cut[1].toLocaleString("en")} characters left out … `)] : [];
}

function pictures(digests) {
  return (digests || []).filter((digest) => data.images[digest]).map((digest) => {
    const image = make("img");
    image.src = data.images[digest];
    image.alt = `image ${digest.slice(0, 16)}`;
    return image;
  });
}

function card(completion, scale) {
  const made = make("div", fits(completion) ? "completion" : "completion aside"), told = make("div", "told");
  told.append(make("b", "", completion.reward == null ? "no reward" : `reward ${shown(completion.reward)}`));
  const terms = Object.entries(completion.terms || {}).map(([term, value]) => `${term} ${shown(value)}`);
  const taught = completion.advantage == null ? [] : [`advantage ${shown(completion.advantage)}`];
  const parts = [...terms, ...taught, `${shown(completion.tokens)} tokens`, completion.finish];
  told.append(` ${parts.join(" · ")}`);
  const images = pictures(completion.images);
  made.append(told, ...images);
  if (completion.text || !images.length) made.append(written(completion, scale));
  if (completion.error) made.append(make("div", "told", `missing score: ${completion.error}`));
  if (completion.feedback) made.append(make("div", "told", `feedback: ${completion.feedback}`));
  (completion.turns || []).forEach((turn, number) => {
    const facts = [`turn ${(turn.order ?? number) + 1}: ${turn.tokens} tokens generated`];
    facts.push(`${turn.observation} tokens of observation`);
    if (turn.order != null) facts.push(turn.parent == null ? "fresh prompt" : `continues turn ${turn.parent + 1}`);
    if (turn.replayed) facts.push("replayed");
    if (turn.calls) facts.push(`${turn.calls} calls (${turn.errors} could not be parsed)`);
    if (turn.reward != null) facts.push(`reward ${shown(turn.reward)}`);
    if (turn.error) facts.push(`failed: ${turn.error}`);
    if (turn.text) facts.push(`text: ${turn.text.length > 160 ? `${turn.text.slice(0, 160)}…` : turn.text}`);
    const line = make("div", turn.depth ? "told branch" : "told", facts.join(", "));
    line.style.marginLeft = `${turn.depth}em`;
    made.append(line);
  });
  (completion.judged || []).forEach((judged) => {
    made.append(make("div", "told", `judge ${judged.term} (${shown(judged.value)}): ${judged.text}`));
  });
  return made;
}

const ranks = {
  best: (completion) => completion.reward ?? -Infinity,
  worst: (completion) => -(completion.reward ?? Infinity),
  spread: (completion) => completion.reward ?? -Infinity,
  advantage: (completion) => Math.abs(completion.advantage || 0),
  length: (completion) => completion.tokens,
};

function part(group, batch) {
  const heading = make("h3", "", `${batch}: mean reward ${shown(group.mean)}`), cards = make("div", "completions");
  if (group.size > group.completions.length) heading.append(` (${group.completions.length} of ${group.size} shown)`);
  const rank = ranks[at("order").value], sorted = [...group.completions];
  if (rank) sorted.sort((one, other) => rank(other) - rank(one));
  const sizes = group.completions.flatMap((each) => (each.advantages || []).map(([, value]) => Math.abs(value)));
  const scale = Math.max(1e-9, ...sizes);
  cards.append(...sorted.map((completion) => card(completion, scale)));
  return [heading, cards];
}

function showGroup() {
  const group = chosen, beside = at("beside").value;
  at("group").replaceChildren();
  document.querySelectorAll("#groups button").forEach((button) => button.setAttribute("aria-current", button.group === group));
  if (!group) return;
  at("group").append(make("p", "quiet", `prompt ${group.prompt_id}, reference answer ${group.answer ?? "-"}`), ...pictures(group.images), make("pre", "", group.prompt));
  at("group").append(...part(group, group.batch));
  if (!beside) return;
  const others = groups.filter((other) => other.batch === beside), same = others.find((other) => other.prompt_id === group.prompt_id);
  const other = same || others[matching(group.batch).indexOf(group) % others.length];
  if (!same) at("group").append(make("p", "quiet", `${beside} has other prompts, such as ${other.prompt_id}, reference answer ${other.answer ?? "-"}`), make("pre", "", other.prompt));
  at("group").append(...part(other, beside));
}

function showList(event) {
  if (event && ["batch", "order"].includes(event.target.id)) chosen = null;
  const found = matching(at("batch").value);
  at("groups").replaceChildren(...found.map((group) => {
    const item = make("li"), button = make("button");
    button.type = "button";
    button.group = group;
    button.append(make("span", "", group.prompt.trim().slice(0, 120)), make("span", "quiet", `mean reward ${shown(group.mean)} of ${group.size}`));
    button.addEventListener("click", () => { chosen = group; showGroup(); });
    item.append(button);
    return item;
  }));
  const all = groups.filter((group) => group.batch === at("batch").value).length;
  at("found").textContent = `${found.length} of ${all} prompts of ${at("batch").value}`;
  at("scale").textContent = {
    "": "",
    advantage: "· underlined: positive advantage; dotted: negative; a stronger color is a larger advantage",
    logprob: "· a stronger color is a less likely token",
  }[at("tint").value];
  const same = chosen && found.find((group) => group.prompt_id === chosen.prompt_id);
  chosen = same || found[0] || null;
  showGroup();
}

if (groups.length) {
  const batches = [...new Set(groups.map((group) => group.batch))];
  option(at("beside"), "", "nothing");
  batches.forEach((batch) => { option(at("batch"), batch, batch); option(at("beside"), batch, batch); });
  ["reward", ...data.terms].forEach((term) => option(at("term"), term, term));
  at("batch").value = data.batch;
  at("beside").value = data.beside;
  ["batch", "beside", "query", "term", "least", "most", "order", "tint"].forEach((id) => at(id).addEventListener("input", showList));
  showList();
}
