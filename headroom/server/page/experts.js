// A live heat map of a model's routed experts: how often each is picked, and which are hot.

import { getJson } from "./api.js";
import { el } from "./dom.js";
import { counted } from "./message.js";

const WAIT = 1000; // milliseconds between two readings
const RATES = 60; // hit rates that the small curve shows
const FADE = 0.6; // what one reading leaves of the recent picks
const ROW = 12; // pixels of a layer
const [LEFT, BELOW] = [28, 16]; // pixels beside the cells, for the numbers of layers and of experts
// Why picked experts were in GPU memory, and where the others were found: keys of the server, names.
const CAUSES = [["pinned", "own slot"], ["cached", "cached"], ["prefetched", "prefetched"]];
const PATHS = [["filled", "filled over link"], ["in_place", "read over link"], ["cpu", "CPU"]];

const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);

/** Shows the experts of a model while it is visible. */
export class ExpertsView {
  constructor(target) {
    this.target = target;
    this.timer = 0;
    this.turn = 0; // the last call of `show`; earlier readings are dropped
    this.model = null;
    this.chosen = null; // whether colours show recent picks (true) or all; null: nobody chose
  }

  /** Show a model of the server's list; null hides the view. */
  show(entry) {
    const model = entry?.id ?? null;
    clearTimeout(this.timer);
    this.turn += 1;
    if (model !== this.model) this.forget();
    this.model = model;
    if (model !== null) this.read(model, this.turn);
  }

  forget() {
    this.before = null;
    this.warmth = null; // recent picks by layer and expert, which fade
    this.picked = false; // whether there were picks since the view was opened
    this.rates = []; // hit rates between readings
    this.mixes = []; // between readings: shares of picks by cause of hit, then by path of miss
    this.cell = null; // the cell under the pointer or the cursor keys
    this.built = false;
    this.target.replaceChildren(el("p", { class: "help" }, "Reading the experts…"));
  }

  /** Whether colours show recent picks; until there are some, those since the start say more. */
  get recent() {
    return this.chosen ?? this.picked;
  }

  async read(model, turn) {
    try {
      const now = document.hidden ? null : await getJson(`/experts?model=${encodeURIComponent(model)}`);
      if (now && turn === this.turn) this.take(now);
    } catch (error) {
      if (turn === this.turn && !this.built) this.target.replaceChildren(el("p", { class: "help" }, error.message));
    }
    if (turn === this.turn) this.timer = setTimeout(() => this.read(model, turn), WAIT);
  }

  take(now) {
    if (!now.layers.length) {
      const text = now.loaded ? "This model has no routed experts: every token uses all of its weights." : "The model is not loaded. Send it a message first.";
      this.target.replaceChildren(el("p", { class: "help" }, text));
      this.built = false;
      return;
    }
    if (!this.built) this.build(now);
    this.warm(now);
    this.now = now;
    this.drawNumbers();
    this.draw();
  }

  /** Add the picks since the last reading to the recent ones. */
  warm(now) {
    const { before } = this;
    this.warmth ??= now.layers.map((layer) => new Float64Array(layer.picks.length));
    if (before && before.picks <= now.picks) {
      now.layers.forEach((layer, row) => {
        const warmth = this.warmth[row];
        layer.picks.forEach((count, expert) => {
          const added = count - before.layers[row].picks[expert];
          warmth[expert] = (now.picks > before.picks ? FADE * warmth[expert] : warmth[expert]) + added;
        });
      });
      if (now.picks > before.picks) {
        this.picked = true;
        this.rates.push((now.hits - before.hits) / (now.picks - before.picks));
        this.rates = this.rates.slice(-RATES);
        this.mixes.push(mix(before, now));
        this.mixes = this.mixes.slice(-RATES);
      }
    }
    this.before = now;
  }

  build(now) {
    this.built = true;
    this.numbers = el("dl", { class: "facts" });
    this.curve = el("canvas", { class: "curve", "aria-hidden": "true" });
    this.mix = el("canvas", { class: "curve", "aria-hidden": "true" });
    this.mixed = el("p", { class: "help mix-legend" });
    this.map = el("canvas", { class: "heat", tabindex: "0", role: "application", "aria-label": "Heat map of experts; arrow keys move from expert to expert", "aria-describedby": "heat-cell" });
    this.told = el("p", { class: "help heat-cell", id: "heat-cell", role: "status" });
    const choice = (recent, text) =>
      el("button", { type: "button", class: "chip", onclick: () => this.choose(recent) }, text);
    this.choices = [choice(true, "Recent"), choice(false, "Since start")];
    this.table = el("tbody");
    const head = el("tr", {}, ...["Layer", "Hit rate", "Hot", "Most picked"].map((text) => el("th", { scope: "col" }, text)));
    this.layers = el("details", { class: "more" }, el("summary", {}, "Layers as a table"), el("table", { class: "layers" }, el("thead", {}, head), this.table));
    this.layers.addEventListener("toggle", () => this.drawTable());
    this.target.replaceChildren(
      this.numbers,
      this.curve,
      this.mix,
      this.mixed,
      el("div", { class: "heat-head" }, el("span", { class: "chips", role: "group", "aria-label": "Picks shown" }, ...this.choices), legend(now)),
      this.told,
      this.map,
      this.layers,
    );
    this.map.addEventListener("pointermove", (event) => this.point(event));
    this.map.addEventListener("pointerleave", () => this.select(null));
    this.map.addEventListener("keydown", (event) => this.step(event));
  }

  choose(recent) {
    this.chosen = recent;
    this.draw();
  }

  drawChoice() {
    this.choices[0].setAttribute("aria-pressed", String(this.recent));
    this.choices[1].setAttribute("aria-pressed", String(!this.recent));
    if (!this.cell) this.tellNothing();
  }

  /** Say what the map shows while no expert is selected. */
  tellNothing() {
    const text = this.recent && !this.picked ? "Nothing was picked since these figures were opened." : "Rows are layers, columns are experts.";
    if (this.told.textContent !== text) this.told.textContent = text;
  }

  drawNumbers() {
    const { now } = this;
    const experts = now.layers.reduce((sum, layer) => sum + layer.hot.length, 0);
    const hot = now.layers.reduce((sum, layer) => sum + [...layer.hot].filter((letter) => letter === "h").length, 0);
    const facts = [
      ["Hit rate", percent(now.hit_rate)],
      ["Lately", percent(this.rates.at(-1))],
      ["Hot experts", `${counted(hot)} of ${counted(experts)}`],
      ["Tokens", counted(now.tokens)],
      ["Cold picks", counted(now.cold_picks)],
      ["Exchanges", counted(now.swaps)],
    ];
    if (now.cpu_share !== undefined) facts.push(["CPU's share", percent(now.cpu_share)], ["CPU's pace", percent(now.cpu_pace)]);
    this.numbers.replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  draw() {
    this.drawChoice();
    this.drawMap();
    this.drawCurve();
    this.drawMix();
    this.drawTable();
  }

  /** Return the values that colours show, by row and expert. */
  values(row) {
    return this.recent ? this.warmth[row] : this.now.layers[row].picks;
  }

  drawMap() {
    const { now, map } = this;
    const width = Math.max(100, map.clientWidth);
    const height = ROW * now.layers.length + BELOW;
    map.style.height = `${height}px`;
    const draw = scaled(map, width, height);
    const colours = palette(map);
    this.drawNames(draw, width, colours.soft);
    now.layers.forEach((layer, row) => {
      const values = this.values(row);
      const peak = values.reduce((most, value) => Math.max(most, value), 0);
      const cell = (width - LEFT) / values.length;
      const gap = cell > 4 ? 1 : 0;
      values.forEach((value, expert) => {
        // Square roots keep seldom picked experts visible beside the few that are always picked.
        const depth = peak > 0 ? Math.sqrt(value / peak) : 0;
        draw.globalAlpha = 0.1 + 0.9 * depth;
        draw.fillStyle = layer.hot[expert] === "h" ? colours.hot : colours.cold;
        draw.fillRect(LEFT + expert * cell, row * ROW, Math.max(0.5, cell - gap), ROW - 1);
      });
    });
    draw.globalAlpha = 1;
    if (this.cell) {
      const cell = (width - LEFT) / now.layers[this.cell.row].picks.length;
      draw.strokeStyle = colours.text;
      draw.lineWidth = 1.5;
      draw.strokeRect(LEFT + this.cell.expert * cell - 0.5, this.cell.row * ROW - 0.5, cell + 0.5, ROW);
    }
  }

  /** Write the numbers of layers to the left of the map, and those of experts below it. */
  drawNames(draw, width, colour) {
    const { layers } = this.now;
    const experts = Math.max(...layers.map((layer) => layer.picks.length));
    const cell = (width - LEFT) / experts;
    draw.fillStyle = colour;
    draw.font = "10px system-ui, sans-serif";
    draw.textBaseline = "middle";
    draw.textAlign = "right";
    for (let row = 0; row < layers.length; row += stride(40 / ROW)) {
      draw.fillText(String(layers[row].layer), LEFT - 6, (row + 0.5) * ROW);
    }
    draw.textAlign = "center";
    for (let expert = 0; expert < experts; expert += stride(40 / cell)) {
      draw.fillText(String(expert), LEFT + (expert + 0.5) * cell, ROW * layers.length + BELOW / 2 + 1);
    }
  }

  /** Draw what became of the picks of the last readings: hits by cause below, misses by path above. */
  drawMix() {
    const { mix, mixes } = this;
    const kinds = [...CAUSES, ...PATHS];
    const shown = kinds.map((_, kind) => mixes.some((shares) => shares[kind] > 0));
    // One kind of hit alone says no more than the hit rate.
    mix.hidden = this.mixed.hidden = mixes.length < 2 || shown.filter(Boolean).length < 2;
    if (mix.hidden) return;
    const [width, height, left] = [Math.max(100, mix.clientWidth), 56, 40];
    const draw = scaled(mix, width, height);
    const colours = palette(mix);
    const paint = (kind) => {
      const hit = kind < CAUSES.length;
      draw.fillStyle = hit ? colours.hot : colours.cold;
      draw.globalAlpha = [1, 0.65, 0.35][hit ? kind : kind - CAUSES.length];
    };
    const bar = (width - left - 4) / Math.max(20, mixes.length);
    mixes.forEach((shares, index) => {
      let bottom = height;
      shares.forEach((share, kind) => {
        paint(kind);
        draw.fillRect(left + index * bar, bottom - share * height, Math.max(0.5, bar - 1), share * height);
        bottom -= share * height;
      });
    });
    draw.globalAlpha = 1;
    const last = mixes.at(-1);
    const words = kinds.flatMap(([, name], kind) => (shown[kind] ? [`${name} ${percent(last[kind])}`] : []));
    this.mixed.textContent = `Picks lately, from the bottom up: ${words.join(", ")}.`;
  }

  /** Draw the hit rates of the last readings, from the lowest to 100 %. */
  drawCurve() {
    const { curve, rates } = this;
    curve.hidden = rates.length < 2;
    if (curve.hidden) return;
    const [width, height, left, top] = [Math.max(100, curve.clientWidth), 56, 40, 6];
    const draw = scaled(curve, width, height);
    const colours = palette(curve);
    const low = Math.max(0, Math.floor(20 * Math.min(...rates) - 0.5) / 20);
    const step = (width - left - 4) / (Math.max(20, rates.length) - 1);
    const down = (rate) => top + ((1 - rate) / Math.max(0.05, 1 - low)) * (height - 2 * top);
    draw.font = "11px system-ui, sans-serif";
    draw.textAlign = "right";
    draw.textBaseline = "middle";
    for (const rate of [1, low]) {
      draw.fillStyle = draw.strokeStyle = colours.soft;
      draw.fillText(`${Math.round(100 * rate)} %`, left - 6, down(rate));
      draw.globalAlpha = 0.3;
      draw.fillRect(left, Math.round(down(rate)), width - left, 1);
      draw.globalAlpha = 1;
    }
    draw.beginPath();
    rates.forEach((rate, index) => draw.lineTo(left + index * step, down(rate)));
    draw.strokeStyle = draw.fillStyle = colours.hot;
    draw.lineWidth = 2;
    draw.lineJoin = "round";
    draw.stroke();
    draw.lineTo(left + (rates.length - 1) * step, down(low));
    draw.lineTo(left, down(low));
    draw.globalAlpha = 0.12;
    draw.fill();
    draw.globalAlpha = 1;
  }

  drawTable() {
    if (!this.layers.open) return;
    const rows = this.now.layers.map((layer, row) => {
      const values = this.values(row);
      const picks = layer.picks.reduce((sum, count) => sum + count, 0);
      const most = values.reduce((best, value, expert) => (value > values[best] ? expert : best), 0);
      const hot = [...layer.hot].filter((letter) => letter === "h").length;
      const texts = [layer.layer, picks ? percent(layer.hits / picks) : "–", `${hot} of ${layer.hot.length}`, picks ? `expert ${most}` : "–"];
      return el("tr", {}, ...texts.map((text) => el("td", {}, String(text))));
    });
    this.table.replaceChildren(...rows);
  }

  point(event) {
    const box = this.map.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / ROW);
    const layer = this.now.layers[row];
    if (!layer) return;
    const expert = Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT)) * layer.picks.length);
    if (expert >= 0 && expert < layer.picks.length) this.select({ row, expert });
  }

  step(event) {
    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [0, 0];
    if (!down && !right) return;
    event.preventDefault();
    const { row, expert } = this.cell ?? { row: 0, expert: -right };
    const next = Math.min(this.now.layers.length - 1, Math.max(0, row + down));
    const last = this.now.layers[next].picks.length - 1;
    this.select({ row: next, expert: Math.min(last, Math.max(0, expert + right)) });
  }

  select(cell) {
    this.cell = cell;
    this.drawMap();
    if (!cell) {
      this.tellNothing();
      return;
    }
    const layer = this.now.layers[cell.row];
    const picks = layer.picks.reduce((sum, count) => sum + count, 0);
    const count = layer.picks[cell.expert];
    const place = layer.hot[cell.expert] === "h" ? "hot" : "cold";
    this.told.textContent = `Layer ${layer.layer}, expert ${cell.expert}: ${counted(count, "pick")} (${percent(picks ? count / picks : 0)}), ${place}.`;
  }
}

/** Return the shares of the picks between two readings, by cause of hit and then by path of miss. */
function mix(before, now) {
  const added = (key, kinds) => kinds.map(([kind]) => Math.max(0, (now[key]?.[kind] ?? 0) - (before[key]?.[kind] ?? 0)));
  const total = now.picks - before.picks;
  const hits = added("hits_by", CAUSES).map((count) => count / total);
  const misses = added("misses_by", PATHS);
  // Several rows may miss one expert, which counts once: the paths share what are no hits.
  const experts = misses.reduce((sum, count) => sum + count, 0);
  const missed = 1 - Math.min(1, hits.reduce((sum, share) => sum + share, 0));
  return [...hits, ...misses.map((count) => (experts > 0 ? (missed * count) / experts : 0))];
}

/** Return the least power of two that is at least `least`: the distance of two numbers beside the map. */
function stride(least) {
  let found = 1;
  while (found < least) found *= 2;
  return found;
}

function legend(now) {
  const cold = now.layers.some((layer) => layer.hot.includes("c"));
  const sign = (kind, text) => el("span", {}, el("span", { class: `swatch ${kind}` }), text);
  return el("span", { class: "heat-legend" }, sign("hot", "hot"), cold ? sign("cold", "cold") : null);
}

/** Return a drawing context whose unit is a pixel of the page. */
function scaled(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== h) canvas.height = h;
  const draw = canvas.getContext("2d");
  draw.setTransform(ratio, 0, 0, ratio, 0, 0);
  draw.clearRect(0, 0, width, height);
  return draw;
}

function palette(node) {
  const style = getComputedStyle(node);
  const colour = (name) => style.getPropertyValue(name).trim();
  return { hot: colour("--hot"), cold: colour("--cold"), text: colour("--text"), soft: colour("--soft") };
}
