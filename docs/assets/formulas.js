// Sets each formula of pymdownx.arithmatex, \(...\) within a line and \[...\] on its own, with KaTeX.
for (const place of document.querySelectorAll(".arithmatex")) {
  const formula = place.textContent.trim().slice(2, -2);
  katex.render(formula, place, { displayMode: place.tagName === "DIV", throwOnError: false });
}
