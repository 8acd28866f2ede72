// What classic scripts and an exported page put beside the modules.

interface Window {
  recorded?: any;
}
declare const uPlot: any;
