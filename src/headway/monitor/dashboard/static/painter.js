// When charts are drawn: one per frame where they are in sight, the rest ahead of time while nothing else happens.

const AHEAD = "600px"; // what is this close counts as in sight, so that scrolling meets charts that are there
const RESTING = 200; // ms without scrolling after which the page counts as idle
const SPARE = 6; // ms that must be left of a frame to draw in
const LATEST = 500; // ms after which a page that is never idle draws all the same

const whenIdle = window.requestIdleCallback ?? ((run) => setTimeout(() => run({ timeRemaining: () => SPARE }), 50));

// Items have a `node` and `paint()`, which is false where there was nothing to draw yet. One that was drawn before and is
// out of sight keeps its picture until it is near.
export class Painter {
  constructor() {
    Object.assign(this, { items: new Map(), near: new Set(), waiting: new Set(), painted: new WeakSet() });
    Object.assign(this, { framed: false, idling: false, scrolled: -Infinity, closed: false });
    this.sight = new IntersectionObserver((seen) => this.look(seen), { rootMargin: AHEAD });
    this.onscroll = () => {
      this.scrolled = performance.now();
    };
    addEventListener("scroll", this.onscroll, { passive: true });
  }

  add(item) {
    this.items.set(item.node, item);
    this.sight.observe(item.node);
  }

  // Ask for an item to be drawn with what it knows by then.
  want(item) {
    this.waiting.add(item);
    this.next();
  }

  // Until everything is drawn and nobody scrolls: the time for work that would get into the way of either.
  async rested() {
    const busy = () => this.pick(true) || this.pick(false) || performance.now() < this.scrolled + RESTING;
    while (!this.closed && busy()) await new Promise((done) => setTimeout(done, 50));
  }

  clear() {
    this.sight.disconnect();
    for (const set of [this.items, this.near, this.waiting]) set.clear();
  }

  close() {
    this.clear();
    this.closed = true;
    removeEventListener("scroll", this.onscroll);
  }

  look(seen) {
    for (const { target, isIntersecting } of seen) {
      const item = this.items.get(target);
      if (item && isIntersecting) this.near.add(item);
      else this.near.delete(item);
    }
    this.next();
  }

  next() {
    if (this.closed) return;
    if (!this.framed && this.pick(true)) {
      this.framed = true;
      requestAnimationFrame(() => {
        this.framed = false;
        this.paint(this.pick(true));
      });
    }
    if (!this.idling && this.pick(false)) this.idle();
  }

  idle(since = performance.now()) {
    this.idling = true;
    const idle = (deadline) => {
      const rest = this.scrolled + RESTING - performance.now();
      if (rest > 0) {
        setTimeout(() => this.idle(), rest);
      } else if (deadline.timeRemaining() < SPARE && performance.now() < since + LATEST) {
        this.idle(since);
      } else {
        this.idling = false;
        this.paint(this.pick(false));
      }
    };
    whenIdle(idle, { timeout: LATEST });
  }

  pick(near) {
    for (const item of this.waiting)
      if (near ? this.near.has(item) : !this.near.has(item) && !this.painted.has(item)) return item;
    return null;
  }

  paint(item) {
    if (item && !this.closed) {
      this.waiting.delete(item);
      if (item.paint() !== false) this.painted.add(item);
    }
    this.next();
  }
}
