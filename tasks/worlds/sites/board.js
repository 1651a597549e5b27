// Cards are dragged with the mouse. What is dropped on a card takes its place; below the last one, it is the last.
"use strict";
const board = document.getElementById("board");
let card = null, shift = null;

function placeAt(x, y) {
  const column = Array.from(board.querySelectorAll("section")).find(section => {
    const box = section.getBoundingClientRect();
    return x >= box.left && x < box.right;
  });
  if (!column) return null;
  const others = Array.from(column.querySelectorAll(".card")).filter(other => other !== card);
  const before = others.find(other => y < other.getBoundingClientRect().bottom);
  return {column, before: before || null};
}

function show(place) {
  for (const marked of board.querySelectorAll(".over")) marked.classList.remove("over");
  if (place) (place.before || place.column.querySelector(".end")).classList.add("over");
}

board.addEventListener("mousedown", event => {
  card = event.button === 0 ? event.target.closest(".card") : null;
  if (!card) return;
  event.preventDefault();
  shift = {x: event.clientX, y: event.clientY, moved: false};
});

document.addEventListener("mousemove", event => {
  if (!card) return;
  const x = event.clientX - shift.x, y = event.clientY - shift.y;
  if (!shift.moved && Math.abs(x) + Math.abs(y) < 5) return;
  shift.moved = true;
  card.classList.add("held");
  card.style.transform = `translate(${x}px, ${y}px)`;
  show(placeAt(event.clientX, event.clientY));
});

document.addEventListener("mouseup", event => {
  if (!card) return;
  const place = shift.moved && placeAt(event.clientX, event.clientY);
  const form = document.getElementById("moving");
  show(null);
  card.classList.remove("held");
  card.style.transform = "";
  if (place) {
    form.elements.card.value = card.dataset.card;
    form.elements.column.value = place.column.dataset.column;
    form.elements.before.value = place.before ? place.before.dataset.card : "";
    form.submit();
  }
  card = null;
});
