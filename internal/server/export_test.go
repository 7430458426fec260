package server

// TakesPacketsBy is [Flavour.TakesPackets] with another guard.
var TakesPacketsBy = takesPackets
