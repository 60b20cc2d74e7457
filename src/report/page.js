"use strict";
// The page is whole without this: it shows the values below the pointer, smooths more or less, draws over tokens or time, and copies the command.
const SIDE = 1000;
const SVG = "http://www.w3.org/2000/svg";
const form = document.querySelector("form.controls");
const numbers = (text) => (text ? text.split(" ").map(Number) : []);
const rows = (text, width) => numbers(text).reduce((all, x, at) => (at % width ? all.at(-1).push(x) : all.push([x]), all), []);

// What each run had done after a step: [step, tokens] and [step, hours, minutes or seconds].
const clocks = [...document.querySelectorAll("data.clock")].map(({ dataset }) => ({ tokens: rows(dataset.tokens, 2), time: rows(dataset.ms, 2) }));
const longest = Math.max(0, ...clocks.map(({ time }) => time.at(-1)?.[1] ?? 0));
const [unit, ms] = longest >= 72e5 ? ["h", 36e5] : longest >= 12e4 ? ["min", 6e4] : ["s", 1e3];
for (const { time } of clocks) for (const row of time) row[1] /= ms;

/** What stands at `step` in `clock`, of which each row holds what was done by then. */
function reading(clock, step) {
  const next = clock.findIndex(([at]) => at >= step);
  if (next < 0) return clock.at(-1)?.[1] ?? 0;
  const [[x0, y0], [x1, y1]] = [clock[next - 1] ?? [clock[next][0] - 1, 0], clock[next]];
  return y0 + ((y1 - y0) * Math.max(step - x0, 0)) / (x1 - x0 || 1);
}

/** About four round values between the ends. */
function ticks(from, to) {
  const rough = (to - from) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= rough * (1 - 1e-9));
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.min(Math.floor(to / step) - first + 1, 12) }, (_, at) => (first + at) * step);
}

const short = (x) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(x).replace("K", "k");

/** As many digits as a person compares. */
function shown(x) {
  const size = Math.abs(x);
  if (size >= 100) return Math.round(x).toLocaleString("en");
  if (Number.isInteger(x)) return String(x);
  return size >= 10 ? x.toFixed(1) : size >= 1 ? x.toFixed(3) : size >= 0.01 ? x.toFixed(4) : x.toExponential(1);
}

/** Means over a window of so many percent of the points, in which each counts as often as the steps that it stands for. */
function smoothed(means, percent) {
  const reach = Math.floor((means.length * percent) / 200);
  return means.map(([step], at) => {
    const window = means.slice(Math.max(at - reach, 0), at + reach + 1);
    const count = window.reduce((sum, [, , count]) => sum + count, 0);
    return [step, window.reduce((sum, [, value, count]) => sum + value * count, 0) / count];
  });
}

/** A chart that draws itself anew. */
function plotOf(box) {
  const chart = box.querySelector("svg.chart");
  const [first, last] = numbers(chart.dataset.x);
  const [low, high, log] = numbers(chart.dataset.y);
  const height = (value) => (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
  const valueAt = (share) => (log ? low * (high / low) ** share : low + (high - low) * share);
  const runOf = (element) => Number(/ r(\d)/.exec(element.getAttribute("class"))[1]);
  const known = (path) => ({ path, run: runOf(path), places: path.getAttribute("d"), means: rows(path.dataset.means, 3) });
  const paths = [...chart.querySelectorAll("path")].map(known);
  const curves = paths.filter(({ path }) => path.classList.contains("smooth"));
  const pointsOf = ({ path }) => path.getAttribute("d").slice(1).split("L").map((place) => place.split(",").map(parseFloat));
  curves.forEach((curve) => (curve.points = pointsOf(curve)));
  const words = [...chart.querySelectorAll("text.mark")].map((text) => ({ text, run: runOf(text), step: Number(text.dataset.step) }));
  const plot = { box, chart, curves, valueAt, from: first, to: last, axis: "steps" };

  plot.draw = (axis, percent) => {
    const along = (run, step) => (axis === "steps" ? step : reading(clocks[run][axis], step));
    const ends = (step) => curves.map(({ run }) => along(run, step));
    [plot.axis, plot.from, plot.to] = [axis, Math.min(...ends(first)), Math.max(...ends(last))];
    if (!(plot.to > plot.from)) plot.to = plot.from + 1;
    const across = (run, step) => (along(run, step) - plot.from) / (plot.to - plot.from);
    for (const drawn of paths) {
      const { path, run, places, means } = drawn;
      const line = smoothed(means, percent);
      drawn.end = line.at(-1)?.[1];
      const points = line.map(([step, value]) => [SIDE * across(run, step), SIDE * (1 - height(value))].map((x) => x.toFixed(1)));
      const moved = (_, move, x) => move + (SIDE * across(run, first + (x / SIDE) * (last - first))).toFixed(1) + ",";
      const anew = `M${points.join("L")}${points.length === 1 ? "h0" : ""}`;
      path.setAttribute("d", points.length ? anew : places.replace(/([ML])(-?[\d.]+),/g, moved));
    }
    curves.forEach((curve) => (curve.points = pointsOf(curve)));
    for (const { text, run, step } of words) text.setAttribute("x", `${100 * across(run, step)}%`);
    plot.label();
    plot.tick();
  };

  /** The last value of each curve beside its end, moved where two would meet. */
  plot.label = () => {
    let free = 98;
    for (const { end, run } of curves.filter(({ means }) => means.length).sort((a, b) => a.end - b.end)) {
      const text = chart.querySelector(`text.end.r${run}`);
      const down = Math.min(100 * (1 - height(end)), free);
      text.textContent = shown(end);
      text.setAttribute("y", `${down.toFixed(2)}%`);
      free = down - 7;
    }
  };

  plot.tick = () => {
    chart.querySelectorAll("text.x").forEach((text) => text.remove());
    for (const tick of ticks(plot.from, plot.to).filter((tick) => plot.axis === "time" || Number.isInteger(tick))) {
      const text = document.createElementNS(SVG, "text");
      const place = { class: "tick x", x: `${(100 * (tick - plot.from)) / (plot.to - plot.from)}%`, y: "100%", dy: 18, "text-anchor": "middle" };
      for (const [name, value] of Object.entries(place)) text.setAttribute(name, value);
      text.textContent = short(tick);
      chart.append(text);
    }
    chart.querySelector("text.unit").textContent = { steps: "step", tokens: "tokens", time: unit }[plot.axis];
  };
  return plot;
}

/** Shows the values below the pointer. */
function follow(plot) {
  const { box, chart, curves, valueAt } = plot;
  const tip = document.createElement("output");
  const rule = document.createElement("span");
  tip.hidden = rule.hidden = true;
  box.append(rule, tip);
  box.addEventListener("pointermove", (event) => {
    const bounds = chart.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - bounds.left) / bounds.width, 0), 1);
    const far = ([x]) => Math.abs(x - SIDE * share);
    const near = ({ points }) => points.reduce((best, point) => (far(point) < far(best) ? point : best));
    const at = plot.from + share * (plot.to - plot.from);
    const whole = Math.round(at).toLocaleString("en");
    tip.replaceChildren({ steps: `step ${whole}`, tokens: `${whole} tokens`, time: `${at.toPrecision(3)} ${unit}` }[plot.axis]);
    for (const curve of curves) {
      const line = document.createElement("b");
      line.className = `r${curve.run}`;
      line.textContent = shown(valueAt(1 - near(curve)[1] / SIDE));
      tip.append(line);
    }
    rule.style.left = tip.style.left = 100 * share + "%";
    tip.className = share > 0.6 ? "left" : "";
    tip.hidden = rule.hidden = false;
  });
  box.addEventListener("pointerleave", () => { tip.hidden = rule.hidden = true; });
}

const plots = [...document.querySelectorAll(".plot")].map(plotOf);
plots.forEach(follow);

// What is chosen stands behind the address, so that it can be passed on.
function redraw() {
  form.querySelector("output").textContent = `${form.smooth.value} %`;
  plots.forEach((plot) => plot.draw(form.axis.value, form.smooth.value));
}
const asked = new URLSearchParams(location.hash.slice(1));
if (asked.has("axis")) form.axis.value = asked.get("axis");
if (asked.has("smooth")) form.smooth.value = asked.get("smooth");
if (location.hash && form.axis.value) redraw();
form.addEventListener("input", () => {
  redraw();
  history.replaceState(null, "", `#axis=${form.axis.value}&smooth=${form.smooth.value}`);
});
form.hidden = false;

for (const button of document.querySelectorAll("button")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
  });
}
