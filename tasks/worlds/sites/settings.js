// Shows what a slider says, and that something was changed and not saved.
"use strict";
const form = document.getElementById("settings");
form.addEventListener("input", event => {
  const shown = document.getElementById(event.target.id + "-value");
  if (shown) shown.textContent = event.target.value;
  document.getElementById("unsaved").textContent = "You have changes that are not saved.";
});
