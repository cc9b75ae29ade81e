"""A long table, filtered by the page's own script; rows of it are to be archived."""

from html import escape

from headway.envs.browser.site import Request, Response, Site, not_found, page
from headway.envs.browser.sites.words import FAMILY

ROWS = 30
STATES = ("open", "paid", "late")

_SCRIPT = """<script>
const rows = [...document.querySelectorAll("tbody tr")];
const customer = document.querySelector("#customer"), state = document.querySelector("#state");
function filter() {
  for (const row of rows)
    row.hidden = !row.cells[1].textContent.toLowerCase().includes(customer.value.trim().toLowerCase())
      || (state.value && row.cells[2].textContent !== state.value);
}
customer.addEventListener("input", filter);
state.addEventListener("change", filter);
document.querySelector("tbody").addEventListener("click", async (event) => {
  const row = event.target.closest("button") && event.target.closest("tr");
  if (!row) return;
  const body = new URLSearchParams({invoice: row.cells[0].textContent});
  const answer = await fetch("/archive", {method: "POST", body});
  if (answer.ok) row.remove();
});
</script>"""


class Table(Site):
    """Archive all invoices of one customer that have one state, and no others."""

    name = "table"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        customers = self.random.sample(FAMILY, 5)
        numbers = self.random.sample(range(1000, 9999), ROWS)
        self.invoices = {
            str(number): (self.random.choice(customers), self.random.choice(STATES), self.random.randint(10, 900))
            for number in numbers
        }
        customer, state, _ = self.invoices[str(self.random.choice(numbers))]
        self.wanted = {number for number, row in self.invoices.items() if row[:2] == (customer, state)}
        self.archived: set[str] = set()
        self.goal = f"Archive all invoices of the customer {customer} with the state “{state}”, and no others."

    def handle(self, request: Request) -> Response:
        match request.method, request.path:
            case "GET", "/":
                return self._table()
            case "POST", "/archive" if request.form.get("invoice") in self.invoices:
                self.archived.add(request.form["invoice"])
                return Response("archived")
        return not_found()

    def progress(self) -> float:
        right, wrong = len(self.archived & self.wanted), len(self.archived - self.wanted)
        return max(0.0, right - wrong) / len(self.wanted)

    def _table(self) -> Response:
        rows = "".join(
            f"<tr><td>{number}</td><td>{escape(customer)}</td><td>{state}</td><td>{amount} €</td>"
            f"<td><button>Archive {number}</button></td></tr>"
            for number, (customer, state, amount) in self.invoices.items()
            if number not in self.archived
        )
        states = "".join(f"<option>{state}</option>" for state in STATES)
        return page(
            "Invoices",
            "<p><label>Customer <input id=customer></label> ",
            f"<label>State <select id=state><option value=''>all</option>{states}</select></label></p>",
            "<table><thead><tr><th>Number</th><th>Customer</th><th>State</th><th>Amount</th><th>Action</th></tr></thead>",
            f"<tbody>{rows}</tbody></table>{_SCRIPT}",
        )
