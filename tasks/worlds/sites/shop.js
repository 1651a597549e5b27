// Shows only the products whose name has what is typed.
"use strict";
const find = document.getElementById("find");
const tiles = Array.from(document.querySelectorAll(".tile"));
find.addEventListener("input", () => {
  const words = find.value.trim().toLowerCase();
  for (const tile of tiles) tile.hidden = !tile.dataset.name.includes(words);
  document.getElementById("none").hidden = tiles.some(tile => !tile.hidden);
});
