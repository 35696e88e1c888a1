// Search runs in a worker, which browsers refuse to pages of a disk. There, a hidden frame takes the worker's place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.scope.document.createElement("script");
      script.src = url;
      this.ready = new Promise((resolve) => (script.onload = resolve));
      this.scope.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })));
    }
  };
}

// Wide tables scroll in a frame that the theme adds: the keyboard reaches it, too.
addEventListener("load", () =>
  setTimeout(() => {
    for (const frame of document.querySelectorAll(".md-typeset__scrollwrap")) {
      if (frame.scrollWidth > frame.clientWidth) frame.tabIndex = 0;
    }
  }, 100),
);
