"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const tip = document.getElementById("tip");
const stepName = step => step < 0 ? "before the first step" : "step " + step;

function showTip(event, text) {
  tip.textContent = text;
  tip.style.visibility = "visible";
  const x = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.transform = `translate(${Math.max(8, x)}px, ${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 12}px)`;
}
const hideTip = () => { tip.style.visibility = "hidden"; };

// Round numbers for an axis: about `count` of them between low and high.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw || 1));
  const unit = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw) || power;
  const out = [];
  for (let t = Math.ceil(low / unit) * unit; t <= high + unit * 1e-9; t += unit) out.push(Math.abs(t) < unit * 1e-9 ? 0 : t);
  return out;
}

// ---- map: steps from left to right, layers by phase from top to bottom --------------------------------------------
const words = {e: "equal", d: "diverged: inputs agree, output differs", p: "propagated: follows from an earlier difference", m: "nothing to compare", n: "no such record here"};
const worst = {n: 0, e: 1, m: 2, p: 3, d: 4};

function drawMap() {
  const box = document.getElementById("map");
  if (!box) return;
  const canvas = box.querySelector("canvas"), spacer = document.getElementById("spacer"), screen = canvas.getContext("2d");
  // Everything but what follows the pointer is drawn once, here, and copied to the screen.
  const picture = document.createElement("canvas"), context = picture.getContext("2d");
  const differing = document.getElementById("differing"), height = document.getElementById("height");
  const steps = data.steps;
  const allRows = data.rows.map(([phase, layer, lengths]) => {
    const cells = lengths.replace(/(\D)(\d+)/g, (_, letter, count) => letter.repeat(+count)).padEnd(steps.length, "n");
    return {phase, layer, cells, differs: /[dpm]/.test(cells)};
  });
  const axis = 24, bandGap = 10, left = 18, mostHeight = 18;
  let rows = [], width = 0, view = 0, total = 0, labels = 0, cellWidth = 1, hover = null, place = new Map();
  const isFirst = (line, step) => [data.first, ...data.also].some(f => f && f.step === step && line.members.some(row => f.layer === row.layer && (f.phase === row.phase || f.phase === null)));

  // Lines of the map: a row each, or the worst of as many neighbours of one phase as share a pixel.
  function linesOf(chosen) {
    const share = Math.ceil(1 / rowHeight() - 1e-6), lines = [];
    for (const row of chosen) {
      const last = lines[lines.length - 1];
      if (last && last.phase === row.phase && last.members.length < share) last.members.push(row); else lines.push({phase: row.phase, members: [row]});
    }
    for (const line of lines) {
      if (line.members.length === 1) { line.cells = line.members[0].cells; continue; }
      line.cells = steps.map((_, i) => line.members.reduce((w, row) => worst[row.cells[i]] > worst[w] ? row.cells[i] : w, "n")).join("");
    }
    return lines;
  }

  // From "all of it at once" to "every name can be read"; below a pixel several rows share one line.
  const fitting = Math.max(0.2, Math.min(16, 640 / Math.max(1, allRows.length)));
  const rowHeight = () => { const h = fitting * (mostHeight / fitting) ** (height.value / 100); return h >= 2 ? Math.round(h) : h; };
  const drawnHeight = () => Math.max(1, rowHeight());
  const isForkRow = row => data.first && row.layer === data.first.layer && (row.phase === data.first.phase || data.first.phase === null);
  const label = line => { const row = line.members.find(isForkRow) || line.members[0]; return row.layer || row.phase; };
  height.value = 0;
  differing.disabled = !allRows.some(r => r.differs) || allRows.every(r => r.differs);

  function layout() {
    rows = linesOf(allRows.filter(r => !differing.checked || r.differs));
    const h = drawnHeight();
    let y = 0, phase = null;
    place = new Map();
    for (const row of rows) {
      if (phase !== null && row.phase !== phase) y += bandGap;
      phase = row.phase;
      place.set(row, y);
      y += h;
    }
    total = y;
    width = box.clientWidth;
    context.font = "600 11.5px system-ui, sans-serif";
    const longest = rows.reduce((m, r) => Math.max(m, Math.min(context.measureText(label(r)).width, 280)), 40);
    labels = left + Math.min(longest, width * 0.32) + 12;
    cellWidth = Math.min(44, (width - labels - 12) / Math.max(1, steps.length));
    view = Math.min(total + axis + 6, Math.min(innerHeight * 0.74, 760));
    spacer.style.height = total + axis + 6 + "px";
    const ratio = devicePixelRatio || 1;
    canvas.width = picture.width = Math.round(width * ratio);
    canvas.height = picture.height = Math.round(view * ratio);
    canvas.style.width = width + "px";
    canvas.style.height = view + "px";
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    screen.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint();
  }

  const stripes = (colour, ground) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const t = tile.getContext("2d");
    t.fillStyle = ground; t.fillRect(0, 0, 6, 6);
    t.strokeStyle = colour; t.lineWidth = 1.6;
    for (const shift of [-6, 0, 6]) { t.beginPath(); t.moveTo(shift - 1, 7); t.lineTo(shift + 7, -1); t.stroke(); }
    return context.createPattern(tile, "repeat");
  };

  const gap = (w, h) => w >= 7 && h >= 6 ? 1 : 0;

  // Columns narrower than a pixel are drawn as the worst of the steps they hold.
  function columns() {
    if (cellWidth >= 1) return steps.map((_, i) => [i, i + 1]);
    const count = Math.floor(cellWidth * steps.length);
    return Array.from({length: count}, (_, k) => [Math.floor(k * steps.length / count), Math.floor((k + 1) * steps.length / count)]);
  }

  function paint() {
    const top = box.scrollTop, h = drawnHeight(), w = Math.max(1, cellWidth);
    const colours = {e: css("equal"), d: css("diverged"), p: css("propagated"), m: stripes(css("missing"), css("void")), n: css("card")};
    const soft = css("soft");
    const spans = columns(), gapX = gap(w, h), gapY = gapX, marks = [];
    context.clearRect(0, 0, width, view);
    context.textBaseline = "middle";
    let lastLabel = -99;
    const firstRow = rows.find(line => line.members.some(isForkRow));
    const firstY = firstRow ? place.get(firstRow) - top + axis + h / 2 : -99;
    for (const row of rows) {
      const y = place.get(row) - top + axis;
      if (y + h < axis || y > view) continue;
      const letters = spans.map(([from, to]) => {
        let letter = row.cells[from];
        for (let i = from; i < to; ++i) {
          if (worst[row.cells[i]] > worst[letter]) letter = row.cells[i];
        }
        return letter;
      });
      for (let k = 0; k < letters.length;) {
        let end = k + 1;
        while (!gapX && end < letters.length && letters[end] === letters[k]) ++end;
        context.fillStyle = colours[letters[k]];
        if (letters[k] !== "n") context.fillRect(labels + k * w, y, (end - k) * w - gapX, h - gapY);
        k = end;
      }
      spans.forEach(([from, to], k) => {
        if (letters[k] !== "d") return;
        for (let i = from; i < to; ++i) if (isFirst(row, steps[i])) marks.push([labels + k * w, y, row, steps[i]]);
      });
      context.fillStyle = css(row.phase) || soft;
      context.fillRect(left - 8, y, 4, h);
      const middle = Math.max(y + h / 2, axis + 6), isFork = row === firstRow;
      if (isFork || (middle - lastLabel >= 13 && Math.abs(middle - firstY) >= 13)) {
        context.font = (isFork ? "600 " : "") + "11.5px system-ui, sans-serif";
        context.fillStyle = isFork ? css("bad") : soft;
        context.textAlign = "left";
        context.fillText(fit(label(row), labels - left - 8), left + 2, middle);
        if (!isFork) lastLabel = middle;
      }
    }
    for (const [x, y, row, step] of marks) {
      const main = row === firstRow && step === data.first.step;
      context.strokeStyle = css("mark");
      context.lineWidth = 2;
      const cx = x + (w - gapX) / 2, cy = y + (h - gapY) / 2, r = Math.max(6, Math.min(w, h) * 0.75);
      context.beginPath(); context.arc(cx, cy, r, 0, 7); context.stroke();
      if (main) {
        context.font = "650 12px system-ui, sans-serif";
        const before = cx + r + 40 > width;
        context.textAlign = before ? "right" : "left";
        const tx = before ? cx - r - 5 : cx + r + 5;
        context.lineWidth = 4; context.strokeStyle = css("card"); context.lineJoin = "round";
        context.strokeText("fork", tx, cy); context.fillStyle = css("mark"); context.fillText("fork", tx, cy);
      }
    }
    paintPhases(top, h);
    paintAxis(w, spans, soft);
    show();
  }

  // The picture, and on it the cell under the pointer with its row's name.
  function show() {
    screen.clearRect(0, 0, width, view);
    screen.drawImage(picture, 0, 0, width, view);
    if (!hover) return;
    const h = drawnHeight(), w = Math.max(1, cellWidth), shown = Math.max(h, 3);
    screen.strokeStyle = css("ink");
    screen.lineWidth = 1.5;
    if (hover.k >= 0) screen.strokeRect(labels + hover.k * w - 1, hover.y - shown / 2 - 1, w + 2 - gap(w, h), shown + 2 - gap(w, h));
    screen.fillStyle = css("card");
    screen.fillRect(left, hover.y - 8, labels - left - 3, 16);
    screen.font = "600 11.5px system-ui, sans-serif";
    screen.textBaseline = "middle";
    screen.fillStyle = css("ink");
    context.font = screen.font;
    screen.fillText(fit(label(hover.row), labels - left - 8), left + 2, hover.y);
  }

  function paintPhases(top, h) {
    const bands = [];
    for (const row of rows) {
      const y = place.get(row), last = bands[bands.length - 1];
      if (last && last.phase === row.phase && y - last.end < 1) last.end = y + h; else bands.push({phase: row.phase, start: y, end: y + h});
    }
    context.font = "600 11px system-ui, sans-serif";
    for (const band of bands) {
      const start = Math.max(axis, band.start - top + axis), end = Math.min(view, band.end - top + axis);
      const length = context.measureText(band.phase).width;
      if (end - start < length + 4) continue;
      context.save();
      context.translate(4, Math.min((start + end) / 2, end - length / 2 - 2));
      context.rotate(-Math.PI / 2);
      context.textAlign = "center";
      context.fillStyle = css(band.phase) || css("soft");
      context.fillText(band.phase, 0, 0);
      context.restore();
    }
  }

  function paintAxis(w, spans, soft) {
    context.fillStyle = css("card");
    context.fillRect(0, 0, width, axis - 2);
    context.font = "11.5px system-ui, sans-serif";
    context.textAlign = "center";
    let last = -99;
    const every = Math.max(1, Math.ceil(46 / w));
    const nice = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000].find(n => n >= every * (spans[0] ? spans[0][1] - spans[0][0] : 1)) || every;
    const forkX = data.first ? spans.findIndex(([from, to]) => steps.slice(from, to).includes(data.first.step)) : -1;
    spans.forEach(([from, to], k) => {
      const x = labels + (k + 0.5) * w, isFork = k === forkX;
      const on = steps.slice(from, to).find(s => s >= 0 && s % nice === 0);
      const step = isFork ? data.first.step : steps[from] < 0 ? steps[from] : on;
      if (step === undefined || (!isFork && (x - last < 30 || (forkX >= 0 && Math.abs(k - forkX) * w < 34)))) return;
      context.fillStyle = isFork ? css("bad") : soft;
      context.font = (isFork ? "650 " : "") + "11.5px system-ui, sans-serif";
      context.fillText(step < 0 ? "load" : step, Math.min(x, width - 14), 9);
      context.fillRect(x - 0.5, axis - 6, 1, 4);
      last = x;
    });
    context.textAlign = "left";
    context.fillStyle = soft;
    context.font = "11.5px system-ui, sans-serif";
    context.fillText("step", left + 2, 9);
  }

  function fit(text, room) {
    if (context.measureText(text).width <= room) return text;
    let cut = text;
    while (cut.length > 1 && context.measureText("\u2026" + cut).width > room) cut = cut.slice(1);
    return "\u2026" + cut;
  }

  canvas.addEventListener("mousemove", event => {
    const rect = canvas.getBoundingClientRect(), h = drawnHeight(), w = Math.max(1, cellWidth), spans = columns();
    const x = event.clientX - rect.left, y = event.clientY - rect.top;
    const k = Math.floor((x - labels) / w);
    const row = y < axis ? undefined : rows.find(r => { const t = place.get(r) - box.scrollTop + axis; return y >= t && y < t + h; });
    if (!row || x < left - 8 || k >= spans.length) { if (hover) { hover = null; show(); } hideTip(); return; }
    hover = {row, k, y: place.get(row) - box.scrollTop + axis + h / 2};
    show();
    const others = row.members.length > 1 ? `\n(one of ${row.members.length} rows on this line)` : "";
    if (k < 0) { showTip(event, `${row.phase}\n${label(row)}${others}`); return; }
    const [from, to] = spans[k];
    let at = from, member = row.members[0];
    for (let i = from; i < to; ++i) if (worst[row.cells[i]] > worst[row.cells[at]]) at = i;
    for (const one of row.members) if (worst[one.cells[at]] > worst[member.cells[at]]) member = one;
    const isFork = member.cells[at] === "d" && isFirst({members: [member]}, steps[at]);
    showTip(event, `${stepName(steps[at])}, ${row.phase}\n${member.layer || "(no layer)"}\n${isFork ? "the fork: inputs agree, output differs" : words[member.cells[at]]}${others}`);
  });
  canvas.addEventListener("mouseleave", () => { hover = null; hideTip(); show(); });
  box.addEventListener("scroll", () => { hover = null; hideTip(); paint(); });
  differing.addEventListener("change", layout);
  height.addEventListener("input", () => { layout(); toFork(); });
  function toFork() {
    const row = rows.find(line => line.members.some(isForkRow));
    if (row && total + axis > view) box.scrollTop = Math.max(0, place.get(row) - view / 2);
    paint();
  }
  layout();
  toFork();
  addEventListener("resize", layout);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
}

// ---- losses: both runs, and below them how far they are apart ------------------------------------------------------
function mean(list) {
  const all = new Map();
  for (const curve of list) for (const [step, value] of curve) {
    const entry = all.get(step) || [0, 0];
    all.set(step, [entry[0] + (value === null ? NaN : value), entry[1] + 1]);
  }
  return [...all].filter(([, [, count]]) => count === list.length).map(([step, [sum, count]]) => [step, sum / count]).sort((x, y) => x[0] - y[0]);
}

function lossCurves() {
  const out = [], names = [...new Set(data.losses.map(s => s.name))];
  for (const name of names) {
    const mine = data.losses.filter(s => s.name === name);
    if (mine.length > 1) out.push({title: `${name}, mean of ${mine.length} ranks`, a: mean(mine.map(s => s.a)), b: mean(mine.map(s => s.b))});
    const rank = data.first ? data.first.rank : -1;
    mine.sort((x, y) => (y.rank === rank) - (x.rank === rank) || x.rank - y.rank);
    for (const s of mine) out.push({title: `${name}, rank ${s.rank}`, a: s.a.map(([t, v]) => [t, v === null ? NaN : v]), b: s.b.map(([t, v]) => [t, v === null ? NaN : v])});
  }
  return out;
}

function drawLoss() {
  const box = document.getElementById("loss"), select = document.getElementById("curve");
  if (!box) return;
  const curves = lossCurves();
  curves.forEach((c, i) => select.add(new Option(c.title, i)));

  function paint() {
    const {a, b} = curves[+select.value || 0];
    const width = Math.max(320, box.clientWidth), left = 62, right = 16, top = 14, plot = 220, gap = 34, strip = 70, foot = 24;
    const height = top + plot + gap + strip + foot;
    const points = [...a, ...b], steps = points.map(p => p[0]), values = points.map(p => p[1]).filter(Number.isFinite);
    if (!values.length) { box.textContent = "No finite loss in either run."; return; }
    const low = Math.min(...steps), high = Math.max(...steps), vLow = Math.min(...values), vHigh = Math.max(...values);
    const pad = (vHigh - vLow) * 0.06 || Math.abs(vHigh) * 0.05 || 1;
    const x = step => left + (high === low ? 0.5 : (step - low) / (high - low)) * (width - left - right);
    const y = value => top + (1 - (value - vLow + pad) / (vHigh - vLow + 2 * pad)) * plot;
    const line = curve => {
      let path = "", pen = false;
      for (const [step, value] of curve) {
        if (!Number.isFinite(value)) { pen = false; continue; }
        path += `${pen ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = true;
      }
      return path;
    };
    const other = new Map(b), base = top + plot + gap + strip;
    const apart = a.filter(([s]) => other.has(s)).map(([s, v]) => [s, Object.is(v, other.get(s)) ? 0 : Math.abs(v - other.get(s))]);
    const positive = apart.map(p => p[1]).filter(d => Number.isFinite(d) && d > 0);
    const dHigh = Math.ceil(Math.log10(Math.max(...positive, 1e-12))), dLow = Math.min(dHigh - 1, Math.floor(Math.log10(Math.min(...positive, 1))));
    const barHeight = d => !Number.isFinite(d) ? strip : d > 0 ? Math.max(3, 3 + (Math.log10(d) - dLow) / (dHigh - dLow) * (strip - 3)) : 0;
    const barWidth = Math.max(1, Math.min(10, (width - left - right) / Math.max(1, high - low + 1) - 1));
    let svg = `<svg height="${height}" viewBox="0 0 ${width} ${height}" role="img" aria-label="loss of both runs by step">`;
    for (const t of ticks(vLow - pad, vHigh + pad, 5)) svg += `<line x1="${left}" x2="${width - right}" y1="${y(t)}" y2="${y(t)}" stroke="${css("line")}"/><text x="${left - 8}" y="${y(t) + 4}" text-anchor="end">${+t.toPrecision(6)}</text>`;
    for (const t of ticks(low, high, Math.min(12, width / 90)).filter(Number.isInteger)) svg += `<text x="${x(t)}" y="${height - 6}" text-anchor="middle">${t}</text>`;
    svg += `<line x1="${left}" x2="${width - right}" y1="${base}" y2="${base}" stroke="${css("missing")}"/>`;
    svg += `<text x="${left}" y="${top + plot + gap - 8}">${positive.length ? `distance between the runs, logarithmic: 1e${dLow} to 1e${dHigh}` : apart.some(p => Number.isNaN(p[1])) ? "distance between the runs: not a number in one of them" : "distance between the runs: none, every loss is equal to the last bit"}</text>`;
    if (positive.length) svg += `<text x="${left - 8}" y="${base - strip + 6}" text-anchor="end">1e${dHigh}</text><text x="${left - 8}" y="${base}" text-anchor="end">1e${dLow}</text>`;
    for (const [step, d] of apart) if (d !== 0) svg += `<rect x="${x(step) - barWidth / 2}" y="${base - barHeight(d)}" width="${barWidth}" height="${barHeight(d)}" fill="${css("propagated")}"/>`;
    const fork = data.first && data.first.step >= low && data.first.step <= high ? x(data.first.step) : null;
    if (fork !== null) svg += `<line x1="${fork}" x2="${fork}" y1="${top}" y2="${base}" stroke="${css("diverged")}" stroke-width="1.5" stroke-dasharray="2 3"/><text x="${fork + (fork > width - 130 ? -6 : 6)}" y="${top + 10}" text-anchor="${fork > width - 130 ? "end" : "start"}" style="fill:${css("bad")};font-weight:600">fork, step ${data.first.step}</text>`;
    const dots = (curve, colour) => curve.length === 1 && Number.isFinite(curve[0][1]) ? `<circle cx="${x(curve[0][0])}" cy="${y(curve[0][1])}" r="3.5" fill="${colour}"/>` : "";
    svg += `<path d="${line(a)}" fill="none" stroke="${css("a")}" stroke-width="2"/><path d="${line(b)}" fill="none" stroke="${css("b")}" stroke-width="2" stroke-dasharray="6 4"/>${dots(a, css("a"))}${dots(b, css("b"))}`;
    box.innerHTML = svg + `<line id="cursor" y1="${top}" y2="${base}" stroke="${css("soft")}" visibility="hidden"/></svg>`;
    const first = new Map(a), all = [...new Set(steps)].sort((p, q) => p - q), cursor = box.querySelector("#cursor");
    box.onmousemove = event => {
      const mx = event.clientX - box.getBoundingClientRect().left;
      const step = all.reduce((m, s) => Math.abs(x(s) - mx) < Math.abs(x(m) - mx) ? s : m, all[0]);
      cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); cursor.setAttribute("visibility", "visible");
      const p = first.get(step), q = other.get(step), say = v => v === undefined ? "not recorded" : String(v);
      showTip(event, `${stepName(step)}\nrun A  ${say(p)}\nrun B  ${say(q)}${p === undefined || q === undefined ? "" : Object.is(p, q) ? "\nequal to the last bit" : `\ndistance ${Math.abs(p - q).toExponential(3)}`}`);
    };
    box.onmouseleave = () => { hideTip(); cursor.setAttribute("visibility", "hidden"); };
  }
  select.hidden = curves.length < 2;
  select.addEventListener("change", paint);
  paint();
  addEventListener("resize", paint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
}

drawMap();
drawLoss();
})();
