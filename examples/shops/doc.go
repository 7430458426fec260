// Package shops has no code but tests. They sell one product from many
// processes at once, in the ways in which Go programs read, decide and write,
// and count whether every sale is in the stock.
package shops
