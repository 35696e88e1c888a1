
const find = document.querySelector(".find");
find.hidden = false;
find.addEventListener("input", () => {
  const wanted = find.value.toLowerCase();
  for (const group of document.querySelectorAll("#samples details")) {
    let some = false;
    for (const sample of group.querySelectorAll(".sample")) {
      sample.hidden = !(group.firstChild.textContent + sample.textContent).toLowerCase().includes(wanted);
      some ||= !sample.hidden;
    }
    group.hidden = !some;
    if (wanted) group.open = some;
  }
});
