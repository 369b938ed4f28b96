// Shows the values nearest to the pointer, one per optimizer. The page reads the same without this.
(() => {
  const names = { muon: "Muon", adamw: "AdamW" };
  const tip = document.getElementById("tip");
  const make = (svg, kind, attributes) => {
    const node = document.createElementNS(svg.namespaceURI, kind);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    svg.append(node);
    return node;
  };
  const clear = (svg) => {
    svg.querySelectorAll(".cursor, .hot").forEach((node) => node.remove());
    tip.hidden = true;
  };
  document.querySelectorAll("svg[data-points]").forEach((svg) => {
    const points = JSON.parse(svg.dataset.points);
    if (!points.length) return;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale;
      const nearest = {};
      for (const point of points) {
        const known = nearest[point.s];
        if (!known || Math.abs(point.x - x) < Math.abs(known.x - x)) nearest[point.s] = point;
      }
      const all = Object.values(nearest).sort((a, b) => Math.abs(a.x - x) - Math.abs(b.x - x));
      const shown = all.filter((point) => Math.abs(point.x - all[0].x) < 24);
      clear(svg);
      make(svg, "path", { class: "cursor", d: `M${all[0].x} 26V${svg.viewBox.baseVal.height - 40}` });
      shown.forEach((point) => make(svg, "circle", { class: "hot", cx: point.x, cy: point.y, r: 6 }));
      tip.replaceChildren(...shown.map((point) => {
        const line = document.createElement("div");
        line.textContent = `${names[point.s]}  ${point.t}`;
        return line;
      }));
      tip.hidden = false;
      const left = box.left + all[0].x / scale + 14;
      const fits = left + tip.offsetWidth < document.documentElement.clientWidth - 8;
      tip.style.left = `${(fits ? left : Math.max(8, left - tip.offsetWidth - 28)) + scrollX}px`;
      tip.style.top = `${box.top + scrollY + Math.min(...shown.map((point) => point.y)) / scale - 12}px`;
    });
    svg.addEventListener("pointerleave", () => clear(svg));
  });
})();
