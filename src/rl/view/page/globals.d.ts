// Globals set by classic scripts and by an exported page.

interface Window {
  recorded?: any;
}
declare const uPlot: any;
