// Package matrix tests the product of what the driver promises: each strategy × each way of
// use × each kind of server × with and without maxConns, and a wrapper of drivers above × each fault.
// One kind of a server is that of handles with other character sets than the usual one.
//
// A cell is one point of that product. It runs one unit of work under a lock, with its fault,
// and then asks the same questions as every other cell, the oracles:
//
//   - What is committed is what the caller was told.
//   - The key is free for another process, in time.
//   - The error has the class that the fault calls for, and names the key.
//   - Nothing is left on the server: no connection, no statement, no transaction.
//   - Without a fault the commands that were sent are those of the golden file.
//
// A cell that cannot be stands in the list of impossible cells, with the reason. The short
// form, which every test run has, visits each pair of values of two dimensions at least once;
// "make matrix" visits all cells.
//
// The golden files (testdata, one for each server) have the commands of each cell without a
// fault, with literals folded. "go test ./internal/matrix -update" writes them.
package matrix
