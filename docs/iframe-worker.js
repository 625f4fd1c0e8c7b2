// Search in pages that are opened from disk. Browsers start no worker there, so a hidden frame runs the worker's script.
// mkdocs.yml names this file, and the theme's plugin `offline` would otherwise load one like it from unpkg.com.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      const isLoaded = new Promise((resolve) => script.addEventListener("load", resolve));
      inner.document.head.append(script);
      this.postMessage = (data) => isLoaded.then(() => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
