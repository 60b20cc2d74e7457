"use strict";
// The page is whole without this: it shows the values below the pointer, and copies the command.
for (const plot of document.querySelectorAll(".plot")) {
  const chart = plot.querySelector("svg.chart");
  const [from, to] = chart.dataset.x.split(" ").map(Number);
  const [low, high, log] = chart.dataset.y.split(" ").map(Number);
  const value = (share) => (log ? low * (high / low) ** share : low + (high - low) * share);
  const points = (path) => path.getAttribute("d").slice(1).split("L").map((place) => place.split(",").map(parseFloat));
  const curves = [...chart.querySelectorAll("path.smooth")].map((path) => ({ run: path.getAttribute("class").slice(-2), points: points(path) }));
  const tip = document.createElement("output");
  const rule = document.createElement("span");
  tip.hidden = rule.hidden = true;
  plot.append(rule, tip);
  plot.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const near = (curve) => curve.points.reduce((best, point) => (Math.abs(point[0] - 1000 * share) < Math.abs(best[0] - 1000 * share) ? point : best));
    tip.replaceChildren("step " + Math.round(from + share * (to - from)).toLocaleString("en"));
    for (const curve of curves) {
      const line = document.createElement("b");
      line.className = curve.run;
      line.textContent = value(1 - near(curve)[1] / 1000).toPrecision(4);
      tip.append(line);
    }
    rule.style.left = tip.style.left = 100 * share + "%";
    tip.className = share > 0.6 ? "left" : "";
    tip.hidden = rule.hidden = false;
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = rule.hidden = true; });
}
for (const button of document.querySelectorAll("button")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
  });
}
