// Draws the figures of a page, in the colours of the page.
//
// A colour in a figure is the name of a variable of page.css, such as var(--reused),
// so that one figure serves a light and a dark background.
(async () => {
  const root = document.documentElement;

  // Elements hold gzip in base64.
  async function unpacked(id) {
    const packed = atob(document.getElementById(id).textContent);
    const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream();
    return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).text();
  }

  // A script element that is made here runs only if the page's policy names the hash
  // of its text.
  async function loadPlotly() {
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
    if (!window.Plotly) throw new Error("plotly.js did not start");
  }

  function coloured(value, style) {
    if (typeof value === "string" && value.startsWith("var(--"))
      return style.getPropertyValue(value.slice(4, -1)).trim();
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value && typeof value === "object")
      return Object.fromEntries(
        Object.entries(value).map(([key, item]) => [key, coloured(item, style)]),
      );
    return value;
  }

  const canHover = matchMedia("(hover: hover)").matches;
  const config = {
    responsive: true,
    displaylogo: false,
    typesetMath: false, // names with dollars are names
    displayModeBar: canHover ? "hover" : false,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };

  // Keys of the legend switch lines and bands off and on, in the order of the traces.
  const keysOf = (spot) => [...spot.parentElement.querySelectorAll(".legend button")];
  const isOn = (key) => key.getAttribute("aria-pressed") === "true";

  async function draw(figures) {
    const style = getComputedStyle(root);
    for (const [index, figure] of figures.entries()) {
      const spot = document.getElementById(`chart-${index}`);
      const { data, layout } = coloured(figure, style);
      // A finger that drags means to scroll the page.
      if (!canHover) layout.dragmode = false;
      for (const [trace, key] of keysOf(spot).entries()) data[trace].visible = isOn(key);
      if (!spot.classList.contains("drawn")) spot.replaceChildren();
      await Plotly.react(spot, data, layout, config);
      spot.classList.add("drawn");
    }
  }

  try {
    const figures = JSON.parse(await unpacked("figures"));
    await loadPlotly();
    await draw(figures);
    for (const spot of document.querySelectorAll(".chart"))
      for (const [trace, key] of keysOf(spot).entries())
        key.addEventListener("click", () => {
          key.setAttribute("aria-pressed", String(!isOn(key)));
          Plotly.restyle(spot, { visible: isOn(key) }, [trace]);
        });
    root.dataset.charts = "drawn";
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      draw(figures),
    );
  } catch (error) {
    root.dataset.charts = `not drawn: ${error.message}`;
    for (const spot of document.querySelectorAll(".chart:not(.drawn)"))
      spot.parentElement.querySelector("details").open = true;
  }
})();
